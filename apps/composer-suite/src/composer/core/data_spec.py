"""What to do with the batches of a dataloader."""

from composer._client_names import _default_split_batch as _default_split_batch
from composer._client_names import _split_list as _split_list
from composer_events.data_spec import DataSpec, default_split_batch, ensure_data_spec

__all__ = ["DataSpec", "ensure_data_spec", "default_split_batch"]
