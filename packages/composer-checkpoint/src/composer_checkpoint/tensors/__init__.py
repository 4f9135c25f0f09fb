"""Checkpoints tensor by tensor, whatever their size: one protocol over all formats, reading and writing.

- `open_checkpoint`: a `.pt`, `.safetensors`, packed or per-rank file, the folders of `torch.distributed.checkpoint`,
  DeepSpeed and Hugging Face, as a tree with a `StoredTensor` in the place of each tensor.
- `stream_pt`, `stream_safetensors`, `stream_sharded`, `stream_local`: the same the other way, with never more than one
  tensor in memory.
- `refuse_unfit`: what writing would refuse, without writing.
"""

from composer_checkpoint.tensors._doubled_names import refuse_doubled_names
from composer_checkpoint.tensors._sparse_parts import refuse_sparse
from composer_checkpoint.tensors._unfit import Target, refuse_quantized, refuse_unfit
from composer_checkpoint.tensors.local_stream import stream_local
from composer_checkpoint.tensors.opening import Kind, find_kind, follow_pointers, open_checkpoint
from composer_checkpoint.tensors.pt_stream import stream_pt
from composer_checkpoint.tensors.safetensors_stream import plan_shards, stream_safetensors, stream_shards
from composer_checkpoint.tensors.sharded_stream import stream_sharded
from composer_checkpoint.tensors.source import StoredTensor, TensorSource, aliases_of, as_stored, tensors_in

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
