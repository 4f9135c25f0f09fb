"""What a profiler does with a batch, under the name that Composer's users import it by."""

from composer_events.event import ProfilerAction

__all__ = ["ProfilerAction"]
