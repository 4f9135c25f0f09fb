"""Where logged values go."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer.loggers.progress_bar_logger import ProgressBarLogger as ProgressBarLogger
    from composer_events.logger import Logger as Logger
    from composer_events.logger_destination import LoggerDestination as LoggerDestination

__all__ = ["Logger", "LoggerDestination", "ProgressBarLogger"]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer_events.logger": ["Logger"],
        "composer_events.logger_destination": ["LoggerDestination"],
        "composer.loggers.progress_bar_logger": ["ProgressBarLogger"],
    },
    submodules=["logger", "logger_destination", "progress_bar_logger"],
)
