"""The items of a sharded checkpoint that are no tensors, read as plain data."""

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from composer_checkpoint.pt_file import load_checked, open_pt

if TYPE_CHECKING:
    from composer_checkpoint._file_reader import FileReader

__all__ = ["decode_object", "encode_object"]


def decode_object(data: bytes) -> Any:
    """Return what `torch.save` made these bytes of, if that was plain data.

    Raises:
        UnsafeCheckpointError: If the bytes ask for anything else.
        CorruptCheckpointError: If they are not what `torch.save` writes.
    """
    open_pt(cast("FileReader", _InMemory(data)))  # it asks for no more than size and reading
    return load_checked(cast(str, io.BytesIO(data)), map_location="cpu", mmap=False)  # torch.load takes either


def encode_object(value: object) -> io.BytesIO:
    """Return what `torch.save` makes of an object."""
    encoded = io.BytesIO()
    torch.save(value, encoded)
    encoded.seek(0)
    return encoded


@dataclass(frozen=True, slots=True)
class _InMemory:
    """Bytes that are read by position, as if they were a file."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read(self, offset: int, size_bytes: int) -> bytes:
        return self.data[offset : offset + size_bytes]
