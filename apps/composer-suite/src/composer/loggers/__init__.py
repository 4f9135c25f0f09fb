"""Where logged values go."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer.loggers.cometml_logger import CometMLLogger as CometMLLogger
    from composer.loggers.console_logger import ConsoleLogger as ConsoleLogger
    from composer.loggers.file_logger import FileLogger as FileLogger
    from composer.loggers.in_memory_logger import InMemoryLogger as InMemoryLogger
    from composer.loggers.mlflow_logger import MLFlowLogger as MLFlowLogger
    from composer.loggers.mosaicml_logger import MosaicMLLogger as MosaicMLLogger
    from composer.loggers.neptune_logger import NeptuneLogger as NeptuneLogger
    from composer.loggers.progress_bar_logger import ProgressBarLogger as ProgressBarLogger
    from composer.loggers.slack_logger import SlackLogger as SlackLogger
    from composer.loggers.tensorboard_logger import TensorboardLogger as TensorboardLogger
    from composer.loggers.wandb_logger import WandBLogger as WandBLogger
    from composer_checkpoint.remote.logger import RemoteUploaderDownloader as RemoteUploaderDownloader
    from composer_events.logger import Logger as Logger
    from composer_events.logger_destination import LoggerDestination as LoggerDestination

__all__ = [
    "CometMLLogger",
    "ConsoleLogger",
    "FileLogger",
    "InMemoryLogger",
    "Logger",
    "LoggerDestination",
    "MLFlowLogger",
    "MosaicMLLogger",
    "NeptuneLogger",
    "ProgressBarLogger",
    "RemoteUploaderDownloader",
    "SlackLogger",
    "TensorboardLogger",
    "WandBLogger",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer_checkpoint.remote.logger": ["RemoteUploaderDownloader"],
        "composer_events.logger": ["Logger"],
        "composer_events.logger_destination": ["LoggerDestination"],
        "composer.loggers.cometml_logger": ["CometMLLogger"],
        "composer.loggers.console_logger": ["ConsoleLogger"],
        "composer.loggers.file_logger": ["FileLogger"],
        "composer.loggers.in_memory_logger": ["InMemoryLogger"],
        "composer.loggers.mlflow_logger": ["MLFlowLogger"],
        "composer.loggers.mosaicml_logger": ["MosaicMLLogger"],
        "composer.loggers.neptune_logger": ["NeptuneLogger"],
        "composer.loggers.progress_bar_logger": ["ProgressBarLogger"],
        "composer.loggers.slack_logger": ["SlackLogger"],
        "composer.loggers.tensorboard_logger": ["TensorboardLogger"],
        "composer.loggers.wandb_logger": ["WandBLogger"],
    },
    submodules=[
        "cometml_logger",
        "console_logger",
        "file_logger",
        "in_memory_logger",
        "logger",
        "logger_destination",
        "mlflow_logger",
        "mosaicml_logger",
        "neptune_logger",
        "progress_bar_logger",
        "remote_uploader_downloader",
        "slack_logger",
        "tensorboard_logger",
        "wandb_logger",
    ],
    renamed={
        "TQDMLogger": "composer.loggers.ProgressBarLogger",
        "ObjectStoreLogger": "composer.loggers.RemoteUploaderDownloader",
    },
)
