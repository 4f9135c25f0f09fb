"""Mean average precision of object detection."""

from composer_models import MAP

__all__ = ["MAP"]
