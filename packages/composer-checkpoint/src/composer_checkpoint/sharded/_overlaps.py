"""Whether boxes tile a larger box."""

import math
from collections.abc import Sequence

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

__all__ = ["covers_exactly"]


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
    if pair := _overlap(filled):
        first, second = (f"{tuple(chunk.offsets)} of sizes {tuple(chunk.sizes)}" for chunk in pair)
        return f"has overlapping parts, at {first} and at {second}"
    covered, whole = sum(math.prod(chunk.sizes) for chunk in filled), math.prod(size)
    return None if covered == whole else f"is covered by its parts in {covered} of {whole} elements"


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> tuple[ChunkStorageMetadata, ChunkStorageMetadata] | None:
    """Return two parts that share an element: a sweep along the dim that separates most of them."""
    if len(chunks) < 2:
        return None
    num_dims = len(chunks[0].sizes)
    if num_dims == 0:
        return chunks[0], chunks[1]
    dim = max(range(num_dims), key=lambda d: len({chunk.offsets[d] for chunk in chunks}))
    active: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dim]):
        active = [other for other in active if other.offsets[dim] + other.sizes[dim] > chunk.offsets[dim]]
        for other in active:
            if all(_meet(chunk, other, d) for d in range(num_dims)):
                return other, chunk
        active.append(chunk)
    return None


def _meet(a: ChunkStorageMetadata, b: ChunkStorageMetadata, dim: int) -> bool:
    return a.offsets[dim] < b.offsets[dim] + b.sizes[dim] and b.offsets[dim] < a.offsets[dim] + a.sizes[dim]
