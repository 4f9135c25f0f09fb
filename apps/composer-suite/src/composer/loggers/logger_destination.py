"""Where logged values can go."""

from composer_events.logger_destination import LoggerDestination

__all__ = ["LoggerDestination"]
