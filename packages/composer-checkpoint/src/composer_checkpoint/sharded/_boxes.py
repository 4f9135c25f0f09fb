"""Copies of boxes of stored tensors into tensors in memory, a few megabytes at a time, and checks of tilings."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from operator import lt

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from composer_checkpoint.errors import CorruptCheckpointError

__all__ = ["covers_exactly", "BLOCK_BYTES", "StoredElements", "copy_region", "read_exactly"]

# Large enough to make the cost of a system call negligible, small enough to stay in a core's cache.
BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class StoredElements:
    """Tensor whose elements lie in row-major order in an open file."""

    descriptor: int
    path: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def copy_region(
    stored: StoredElements, start: Sequence[int], lengths: Sequence[int], target: torch.Tensor, block: bytearray
) -> None:
    """Copy the box of sizes `lengths` that begins at `start` into `target`.

    Args:
        stored: Location of the elements.
        start: First index of the box in each dim of the stored tensor.
        lengths: Sizes of the box.
        target: Tensor of shape `lengths`, on any device.
        block: Buffer for reads, at least one element long.
    """
    if not math.prod(lengths):
        return
    if not stored.shape:  # a scalar is treated as a tensor of one element
        one = StoredElements(stored.descriptor, stored.path, stored.offset, stored.dtype, (1,))
        copy_region(one, (0,), (1,), target.reshape(1), block)
        return
    row_shape = stored.shape[1:]
    row_bytes = math.prod(row_shape) * stored.dtype.itemsize
    first = stored.offset + start[0] * row_bytes
    # A row that does not fit into the buffer is copied as a tensor with one dim less.
    if row_bytes > len(block):
        for i in range(lengths[0]):
            row = StoredElements(stored.descriptor, stored.path, first + i * row_bytes, stored.dtype, row_shape)
            copy_region(row, start[1:], lengths[1:], target[i], block)
        return
    rows_at_once = len(block) // row_bytes
    for i in range(0, lengths[0], rows_at_once):
        rows = min(rows_at_once, lengths[0] - i)
        read_exactly(stored.descriptor, stored.path, memoryview(block)[: rows * row_bytes], first + i * row_bytes)
        source = torch.frombuffer(block, dtype=stored.dtype, count=rows * math.prod(row_shape))
        source = source.view(rows, *row_shape)
        # Whole rows are read and then narrowed, which takes fewer system calls than reading each run of elements.
        for dim, (begin, length) in enumerate(zip(start[1:], lengths[1:], strict=True), 1):
            source = source.narrow(dim, begin, length)
        target[i : i + rows].copy_(source)


def read_exactly(descriptor: int, path: str, buffer: memoryview, offset: int) -> None:
    """Fill the buffer from an offset in a file.

    Raises:
        CorruptCheckpointError: If the file ends before the buffer is full.
    """
    done = 0
    while done < buffer.nbytes:
        count = os.preadv(descriptor, [buffer[done:]], offset + done)  # may return fewer bytes than the buffer holds
        if not count:
            raise CorruptCheckpointError(
                f"{path} ends at byte {offset + done}, while it is read, {buffer.nbytes - done} bytes too early. "
                f"Load another checkpoint."
            )
        done += count


# The limit of comparisons per chunk. In a grid, as meshes produce it, a chunk is compared with those of its row; in
# an arrangement made to be slow, it would be compared with all.
_MOST_NEIGHBOURS = 128


def covers_exactly(size: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> str | None:
    """Return what is wrong with the chunks of a tensor; `None` if they cover each element once.

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
    # Chunks inside the tensor that do not overlap cover it exactly if their sizes add up.
    covered, whole = sum(math.prod(chunk.sizes) for chunk in filled), math.prod(size)
    return None if covered == whole else f"is covered by its parts in {covered} of {whole} elements"


class _TooManyNeighboursError(Exception):
    """Raised when comparing all neighboring chunks would take too long."""


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> tuple[ChunkStorageMetadata, ChunkStorageMetadata] | None:
    """Return two chunks that share an element, found by a sweep along the dim that separates most of them."""
    if len(chunks) < 2:
        return None
    # As plain tuples, whose items are faster to access than those of torch.Size.
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
