"""Tensor-by-tensor reading and writing of checkpoints of any size, with one interface for all formats.

- `open_checkpoint`: opens a `.pt`, `.safetensors`, compressed or per-rank file, or a folder of
  `torch.distributed.checkpoint`, DeepSpeed or Hugging Face, as a tree with a `StoredTensor` in place of each tensor.
- `stream_pt`, `stream_safetensors`, `stream_sharded`, `stream_local`: write such a tree, with at most one tensor in
  memory.
- `refuse_unfit`: raises the errors of writing in advance, without writing.
"""

from composer_checkpoint.formats._unsupported import Target, refuse_doubled_names, refuse_quantized, refuse_unfit
from composer_checkpoint.formats.per_rank_tensors import stream_local
from composer_checkpoint.formats.pt_tensors import stream_pt
from composer_checkpoint.formats.safetensors_tensors import plan_shards, stream_safetensors, stream_shards
from composer_checkpoint.formats.tensor_source import (
    StoredTensor,
    TensorSource,
    aliases_of,
    as_stored,
    refuse_sparse,
    tensors_in,
)
from composer_checkpoint.inspection import Kind, find_kind, follow_pointers, open_checkpoint
from composer_checkpoint.sharded.tensors import stream_sharded

__all__ = [
    "open_checkpoint",
    "find_kind",
    "follow_pointers",
    "Kind",
    "Target",
    "TensorSource",
    "StoredTensor",
    "as_stored",
    "tensors_in",
    "aliases_of",
    "refuse_sparse",
    "refuse_doubled_names",
    "refuse_quantized",
    "refuse_unfit",
    "stream_pt",
    "stream_safetensors",
    "plan_shards",
    "stream_shards",
    "stream_sharded",
    "stream_local",
]
