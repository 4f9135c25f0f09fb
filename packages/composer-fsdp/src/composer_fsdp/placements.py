"""Where the part of a tensor that a rank holds lies in the whole."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

__all__ = ["own_region"]


def own_region(sharded: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """Return the part of a whole tensor that this rank's shard holds, as a view.

    Args:
        sharded: Says which part.
        whole: Of the same shape as `sharded` altogether.
    """
    (chunk,) = sharded.__create_chunk_list__()  # the method through which torch's own checkpoints ask a tensor
    return _narrow(whole, chunk.offsets, sharded.to_local().shape)


def _narrow(whole: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
        # A rank beyond the last row holds nothing, and its offset may lie behind the end.
        whole = whole.narrow(dim, min(start, whole.shape[dim] - length), length)
    return whole
