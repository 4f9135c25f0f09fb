"""The one that hands logged values to their destinations."""

from composer_events.log_values import format_log_data_value
from composer_events.logger import Logger

__all__ = ["Logger", "format_log_data_value"]
