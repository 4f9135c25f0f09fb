"""Reading and writing one part of a batch."""

from composer_events.batch_helpers import batch_get, batch_set

__all__ = ["batch_get", "batch_set"]
