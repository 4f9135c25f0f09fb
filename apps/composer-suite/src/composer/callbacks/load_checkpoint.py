"""Loading one more checkpoint at an event of training."""

from composer_checkpoint.load_callback import LoadCheckpoint

__all__ = ["LoadCheckpoint"]
