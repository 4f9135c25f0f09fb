"""What may watch training at events."""

from composer_events.callback import Callback

__all__ = ["Callback"]
