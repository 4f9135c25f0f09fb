"""The one that hands logged values to their destinations."""

from composer._lazy import lazy_face
from composer_events.log_values import format_log_data_value
from composer_events.logger import Logger
from composer_events.logger_destination import LoggerDestination

__all__ = ["Logger", "LoggerDestination", "format_log_data_value"]

__getattr__, __dir__ = lazy_face(__name__, {})
