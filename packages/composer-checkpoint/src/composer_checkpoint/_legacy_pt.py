"""Files of `torch.save` before version 1.6: pickles one after the other, then the storages."""

import mmap as mapping
import struct
from typing import Any

from composer_checkpoint._file_reader import FileReader
from composer_checkpoint._rehearsal import Rehearsal, rehearse
from composer_checkpoint.errors import CorruptCheckpointError, shown
from composer_checkpoint.unpickler import scan

__all__ = ["LEGACY_MAGIC", "read_legacy_bytes", "read_legacy_pt"]

LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_LEADING_PICKLES = 3  # the magic number, the version, and the writer's byte order and sizes


def read_legacy_pt(reader: FileReader, *, record_unknown: bool = False) -> Rehearsal:
    """Read and check everything except the tensors' elements."""
    with mapping.mmap(reader.descriptor, reader.size_bytes, access=mapping.ACCESS_READ) as mapped:
        view = memoryview(mapped)
        try:
            return read_legacy_bytes(view, record_unknown=record_unknown)
        finally:
            view.release()


def read_legacy_bytes(view: memoryview, *, record_unknown: bool = False) -> Rehearsal:
    """Do the same with a file that is in memory."""
    position = 0
    for _ in range(_LEADING_PICKLES):
        start, position = position, scan(view, position)
        rehearse(bytes(view[start:position]))
    end = scan(view, position)
    rehearsal = rehearse(bytes(view[position:end]), record_unknown=record_unknown)
    position = end
    end = scan(view, position)
    keys = rehearse(bytes(view[position:end])).tree
    _check_storages(view, end, keys, rehearsal)
    return rehearsal


def _check_storages(view: memoryview, position: int, keys: Any, rehearsal: Rehearsal) -> None:
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(rehearsal.storages):
        raise CorruptCheckpointError("the file lists other storages than its tensors need. Load another checkpoint.")
    for key in keys:
        storage = rehearsal.storages[key]
        header = bytes(view[position : position + 8])
        position += 8 + storage.size_bytes
        if len(header) < 8 or struct.unpack("<q", header)[0] != storage.numel or position > len(view):
            raise CorruptCheckpointError(
                f"the file of {len(view)} bytes does not have the {storage.size_bytes} bytes of storage {shown(key)}: "
                f"it was cut short or damaged. Load another checkpoint."
            )
    if position != len(view):
        raise CorruptCheckpointError(
            f"the file goes on for {len(view) - position} bytes after its last storage. Load another checkpoint."
        )
