"""Whether boxes tile a larger box."""

import math
from collections.abc import Sequence
from operator import lt

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

__all__ = ["covers_exactly"]

# Of a grid, as meshes make them, a part is compared with those of its row; of parts that were laid out to be a burden,
# with all.
_MOST_NEIGHBOURS = 128


def covers_exactly(size: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> str | None:
    """Return what is wrong with the parts of a tensor, `None` if they cover each element once.

    Example:
        >>> import torch
        >>> covers_exactly((4,), [ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))])
        'is covered by its parts in 3 of 4 elements'
    """
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    for chunk in chunks:
        if any(start + length > whole for start, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            return f"has a part at {tuple(chunk.offsets)} of sizes {tuple(chunk.sizes)} that leaves it"
    try:
        pair = _overlap(filled)
    except _TooManyNeighboursError:
        return f"has {len(filled)} parts in no order, such as no mesh of devices makes"
    if pair:
        first, second = (f"{tuple(chunk.offsets)} of sizes {tuple(chunk.sizes)}" for chunk in pair)
        return f"has overlapping parts, at {first} and at {second}"
    covered, whole = sum(math.prod(chunk.sizes) for chunk in filled), math.prod(size)
    return None if covered == whole else f"is covered by its parts in {covered} of {whole} elements"


class _TooManyNeighboursError(Exception):
    """To compare all parts that lie beside each other would take too long."""


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> tuple[ChunkStorageMetadata, ChunkStorageMetadata] | None:
    """Return two parts that share an element: a sweep along the dim that separates most of them."""
    if len(chunks) < 2:
        return None
    # As plain tuples, whose numbers are at hand.
    boxes = [
        (tuple(chunk.offsets), tuple(map(sum, zip(chunk.offsets, chunk.sizes, strict=True))), chunk) for chunk in chunks
    ]
    num_dims = len(chunks[0].sizes)
    if num_dims == 0:
        return chunks[0], chunks[1]
    dim = max(range(num_dims), key=lambda d: len({starts[d] for starts, _, _ in boxes}))
    active: list[tuple[tuple[int, ...], tuple[int, ...], ChunkStorageMetadata]] = []
    comparisons_left = _MOST_NEIGHBOURS * len(chunks)
    for starts, ends, chunk in sorted(boxes, key=lambda box: box[0][dim]):
        active = [box for box in active if box[1][dim] > starts[dim]]
        comparisons_left -= len(active)
        if comparisons_left < 0:
            raise _TooManyNeighboursError
        for other_starts, other_ends, other in active:
            if all(map(lt, starts, other_ends)) and all(map(lt, other_starts, ends)):
                return other, chunk
        active.append((starts, ends, chunk))
    return None
