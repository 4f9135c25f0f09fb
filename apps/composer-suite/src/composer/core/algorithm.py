"""What may change training at events."""

from composer_events.algorithm import Algorithm

__all__ = ["Algorithm"]
