"""Reading and writing one part of a batch."""

from composer_events.batches import batch_get, batch_set

__all__ = ["batch_get", "batch_set"]
