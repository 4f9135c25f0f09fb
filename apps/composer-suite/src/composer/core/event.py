"""What happens in training, and when."""

from composer_events.event import Event

__all__ = ["Event"]
