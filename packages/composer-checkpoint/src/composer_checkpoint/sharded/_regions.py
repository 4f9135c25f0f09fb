"""Copying a box of a stored tensor into a box of one in memory, a few megabytes at a time."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from composer_checkpoint.errors import CorruptCheckpointError

__all__ = ["BLOCK_BYTES", "StoredElements", "copy_region", "read_exactly"]

# Large enough that a system call costs nothing beside it, small enough to stay in a core's cache.
BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class StoredElements:
    """A tensor whose elements lie in row-major order in an open file."""

    descriptor: int
    path: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def copy_region(
    stored: StoredElements, start: Sequence[int], lengths: Sequence[int], target: torch.Tensor, block: bytearray
) -> None:
    """Copy the box of `lengths` that begins at `start` into the whole of `target`.

    Args:
        stored: Where the elements are.
        start: The box's first index in each dim of the stored tensor.
        lengths: The box's sizes.
        target: Of the shape `lengths`, on any device.
        block: Memory to read through; at least one element long.
    """
    if not math.prod(lengths):
        return
    if not stored.shape:  # a single element
        one = StoredElements(stored.descriptor, stored.path, stored.offset, stored.dtype, (1,))
        copy_region(one, (0,), (1,), target.reshape(1), block)
        return
    row_shape = stored.shape[1:]
    row_bytes = math.prod(row_shape) * stored.dtype.itemsize
    first = stored.offset + start[0] * row_bytes
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
        for dim, (begin, length) in enumerate(zip(start[1:], lengths[1:], strict=True), 1):
            source = source.narrow(dim, begin, length)
        target[i : i + rows].copy_(source)


def read_exactly(descriptor: int, path: str, buffer: memoryview, offset: int) -> None:
    """Fill the buffer from a place in a file.

    Raises:
        CorruptCheckpointError: If the file ends before.
    """
    done = 0
    while done < buffer.nbytes:
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if not count:
            raise CorruptCheckpointError(
                f"{path} ends at byte {offset + done}, while it is read, {buffer.nbytes - done} bytes too early. "
                f"Load another checkpoint."
            )
        done += count
