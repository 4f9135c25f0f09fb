"""Saving the training state at intervals."""

from composer_checkpoint.saver import CheckpointSaver
from composer_events.intervals import create_interval_scheduler

__all__ = ["CheckpointSaver", "create_interval_scheduler"]
