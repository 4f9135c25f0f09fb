"""Callbacks: what watches training and does work of its own."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer.callbacks.early_stopper import EarlyStopper as EarlyStopper
    from composer.callbacks.free_outputs import FreeOutputs as FreeOutputs
    from composer.callbacks.lr_monitor import LRMonitor as LRMonitor
    from composer.callbacks.memory_monitor import MemoryMonitor as MemoryMonitor
    from composer.callbacks.nan_monitor import NaNMonitor as NaNMonitor
    from composer.callbacks.optimizer_monitor import OptimizerMonitor as OptimizerMonitor
    from composer.callbacks.runtime_estimator import RuntimeEstimator as RuntimeEstimator
    from composer.callbacks.speed_monitor import SpeedMonitor as SpeedMonitor
    from composer.callbacks.threshold_stopper import ThresholdStopper as ThresholdStopper
    from composer_checkpoint.load_callback import LoadCheckpoint as LoadCheckpoint
    from composer_checkpoint.saver import CheckpointSaver as CheckpointSaver

__all__ = [
    "CheckpointSaver",
    "EarlyStopper",
    "FreeOutputs",
    "LRMonitor",
    "LoadCheckpoint",
    "MemoryMonitor",
    "NaNMonitor",
    "OptimizerMonitor",
    "RuntimeEstimator",
    "SpeedMonitor",
    "ThresholdStopper",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer.callbacks.early_stopper": ["EarlyStopper"],
        "composer.callbacks.free_outputs": ["FreeOutputs"],
        "composer.callbacks.lr_monitor": ["LRMonitor"],
        "composer.callbacks.memory_monitor": ["MemoryMonitor"],
        "composer.callbacks.nan_monitor": ["NaNMonitor"],
        "composer.callbacks.optimizer_monitor": ["OptimizerMonitor"],
        "composer.callbacks.runtime_estimator": ["RuntimeEstimator"],
        "composer.callbacks.speed_monitor": ["SpeedMonitor"],
        "composer.callbacks.threshold_stopper": ["ThresholdStopper"],
        "composer_checkpoint.saver": ["CheckpointSaver"],
        "composer_checkpoint.load_callback": ["LoadCheckpoint"],
    },
    submodules=[
        "checkpoint_saver",
        "load_checkpoint",
        "early_stopper",
        "free_outputs",
        "lr_monitor",
        "memory_monitor",
        "nan_monitor",
        "optimizer_monitor",
        "runtime_estimator",
        "speed_monitor",
        "threshold_stopper",
    ],
)
