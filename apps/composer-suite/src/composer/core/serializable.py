"""What has a state to save and restore."""

from composer_events.serializable import Serializable

__all__ = ["Serializable"]
