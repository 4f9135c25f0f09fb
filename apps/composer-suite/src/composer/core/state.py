"""Everything that a training run holds."""

from composer_events.state import State

__all__ = ["State"]
