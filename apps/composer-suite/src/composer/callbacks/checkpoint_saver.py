"""Saving the training state at intervals."""

from composer_checkpoint.saver import CheckpointSaver
from composer_events.intervals import create_interval_scheduler as checkpoint_periodically

__all__ = ["CheckpointSaver", "checkpoint_periodically"]
