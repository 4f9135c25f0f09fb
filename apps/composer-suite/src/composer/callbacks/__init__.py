"""Callbacks: what watches training and does work of its own."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer.callbacks.speed_monitor import SpeedMonitor as SpeedMonitor
    from composer_checkpoint.load_callback import LoadCheckpoint as LoadCheckpoint
    from composer_checkpoint.saver import CheckpointSaver as CheckpointSaver

__all__ = ["CheckpointSaver", "LoadCheckpoint", "SpeedMonitor"]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer.callbacks.speed_monitor": ["SpeedMonitor"],
        "composer_checkpoint.saver": ["CheckpointSaver"],
        "composer_checkpoint.load_callback": ["LoadCheckpoint"],
    },
    submodules=["checkpoint_saver", "load_checkpoint", "speed_monitor"],
)
