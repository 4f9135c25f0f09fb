"""What a profiler does with a batch, under the name that Composer's users import it by."""

from composer_events.profiler_action import ProfilerAction

__all__ = ["ProfilerAction"]
