"""The one that hands logged values to their destinations."""

from composer._lazy import lazy_face
from composer_events.logger import Logger
from composer_events.logger_destination import LoggerDestination, format_log_data_value

__all__ = ["Logger", "LoggerDestination", "format_log_data_value"]

__getattr__, __dir__ = lazy_face(__name__, {})
