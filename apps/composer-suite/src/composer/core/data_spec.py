"""What to do with the batches of a dataloader."""

from composer_events.data_spec import DataSpec, default_split_batch, ensure_data_spec

__all__ = ["DataSpec", "ensure_data_spec", "default_split_batch"]
