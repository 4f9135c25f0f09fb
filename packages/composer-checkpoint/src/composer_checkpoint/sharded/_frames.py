"""Where the elements of a tensor lie inside the archive that `torch.save` makes of it."""

import sys
from dataclasses import dataclass

import torch

from composer_checkpoint._rehearsal import TensorSpec, rehearse
from composer_checkpoint._zip_layout import read_zip_layout
from composer_checkpoint.errors import CorruptCheckpointError
from composer_checkpoint.sharded._regions import read_exactly

__all__ = ["FileSlice", "find_elements"]


@dataclass(slots=True)
class FileSlice:
    """A part of an open file, read by position as if it were a file of its own."""

    descriptor: int
    path: str
    offset: int
    size_bytes: int

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return exactly that many bytes.

        Raises:
            CorruptCheckpointError: If the part does not have them.
        """
        if offset < 0 or size_bytes < 0 or offset + size_bytes > self.size_bytes:
            raise CorruptCheckpointError(
                f"bytes {offset} to {offset + size_bytes} were expected, and the item has {self.size_bytes}. Load "
                f"another checkpoint."
            )
        buffer = bytearray(size_bytes)
        read_exactly(self.descriptor, self.path, memoryview(buffer), self.offset + offset)
        return bytes(buffer)


def find_elements(archive: FileSlice, dtype: torch.dtype, shape: torch.Size) -> int | None:
    """Return where in an archive the elements begin, if they lie in row-major order, one after the other.

    Returns:
        The offset, or `None` if the archive holds anything else, such as a transposed or a sparse tensor, or one of
        another dtype or shape.

    Raises:
        CorruptCheckpointError: If this is no archive of `torch.save`'s.
        UnsafeCheckpointError: If its pickle asks for what checkpoints do not need.
    """
    members = read_zip_layout(archive).members
    if "data.pkl" not in members:
        raise CorruptCheckpointError("it lacks data.pkl. Load another checkpoint.")
    pickled, byteorder = members["data.pkl"], members.get("byteorder")
    spec = rehearse(archive.read(pickled.offset, pickled.size_bytes)).tree
    if not isinstance(spec, TensorSpec) or spec.byte_range is None:
        return None
    if f"torch.{spec.dtype.name}" != str(dtype) or spec.shape != tuple(shape):
        return None
    elements = members.get(f"data/{spec.storage.key}")
    if elements is None or elements.size_bytes != spec.storage.size_bytes:
        return None
    if byteorder and archive.read(byteorder.offset, byteorder.size_bytes) != sys.byteorder.encode():
        return None
    return elements.offset + spec.byte_range[0]
