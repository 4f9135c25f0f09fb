"""Where logged values go."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer.loggers.console_logger import ConsoleLogger as ConsoleLogger
    from composer.loggers.in_memory_logger import InMemoryLogger as InMemoryLogger
    from composer.loggers.progress_bar_logger import ProgressBarLogger as ProgressBarLogger
    from composer_checkpoint.remote_uploader_downloader import RemoteUploaderDownloader as RemoteUploaderDownloader
    from composer_events.logger import Logger as Logger
    from composer_events.logger_destination import LoggerDestination as LoggerDestination

__all__ = [
    "ConsoleLogger",
    "InMemoryLogger",
    "Logger",
    "LoggerDestination",
    "ProgressBarLogger",
    "RemoteUploaderDownloader",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer_checkpoint.remote_uploader_downloader": ["RemoteUploaderDownloader"],
        "composer_events.logger": ["Logger"],
        "composer_events.logger_destination": ["LoggerDestination"],
        "composer.loggers.console_logger": ["ConsoleLogger"],
        "composer.loggers.in_memory_logger": ["InMemoryLogger"],
        "composer.loggers.progress_bar_logger": ["ProgressBarLogger"],
    },
    submodules=[
        "console_logger",
        "in_memory_logger",
        "logger",
        "logger_destination",
        "progress_bar_logger",
        "remote_uploader_downloader",
    ],
    renamed={
        "TQDMLogger": "composer.loggers.ProgressBarLogger",
        "ObjectStoreLogger": "composer.loggers.RemoteUploaderDownloader",
    },
)
