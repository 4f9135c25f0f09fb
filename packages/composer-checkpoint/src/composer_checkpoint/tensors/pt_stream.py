"""Writing a `.pt` file with never more than one tensor in memory.

`torch.save` wants all tensors at once. The archive that it writes is a zip: the pickle first, in which a tensor is a
shape and the number of a storage, then the storages' bytes. So the pickle can be made from descriptions, and each
tensor is read when its bytes are due.
"""

import io
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._utils import (
    # The functions that every .pt names; there is no public way to a tensor's pickle.
    _rebuild_sparse_tensor,  # pyright: ignore[reportPrivateUsage]
    _rebuild_tensor_v2,  # pyright: ignore[reportPrivateUsage]
    _rebuild_tensor_v3,  # pyright: ignore[reportPrivateUsage]
)

from composer_checkpoint._encoding import encode, notes_of
from composer_checkpoint._file_reader import FileReader
from composer_checkpoint._more_than_data import more_than_data
from composer_checkpoint._pt_seal import EMPTY_SEAL, PAYLOAD_FOLDER, seal
from composer_checkpoint._pt_writing import Hashes, make_manifest
from composer_checkpoint._rehearsal import rehearse
from composer_checkpoint._zip_layout import read_zip_layout
from composer_checkpoint.hashing import HASH_NAME, new_hasher, tensor_bytes
from composer_checkpoint.manifest import MANIFEST_NAME, Manifest
from composer_checkpoint.tensors._unfit import refuse_unfit
from composer_checkpoint.tensors.source import StoredTensor, as_stored

__all__ = ["stream_pt"]

_FOLDER = "archive"
_ALIGNMENT = 64  # torch's own, so that mapped tensors are aligned
_LOCAL_HEADER_BYTES, _WIDE_FIELD_BYTES = 30, 20
_PADDING_KIND = 0x4246  # the field in which torch hides its padding, too
_PIECE_BYTES = 8 << 20
_PROTOCOL = 2

# The classes by which a pickle says a storage's dtype. Newer dtypes have none, and are named beside untyped bytes.
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex128: torch.ComplexDoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
}


def stream_pt(
    tree: Any,
    path: str | os.PathLike[str],
    *,
    info: Mapping[str, Any] | None = None,
    hash_name: str = HASH_NAME,
    progress: Callable[[int], object] | None = None,
) -> Manifest:
    """Write a tree to one file that `torch.load` and `load_file` read, reading each tensor when its turn comes.

    The file has a manifest and a seal, as `save_file` writes them. Tensors of one storage are written once and stay
    one. It is written in place, as `save_file` does.

    Args:
        tree: Dicts, lists and tuples of `StoredTensor`s, tensors, numbers, strings and `None`.
        path: Where to.
        info: What else the manifest should say.
        hash_name: As for `save_file`.
        progress: Called with the number of bytes after each tensor.

    Returns:
        The manifest.

    Raises:
        IncompatibleCheckpointError: If a tensor is quantized.
        UnsafeCheckpointError: If anything is more than data.

    Example:
        >>> import tempfile
        >>> from composer_checkpoint.tensors import as_stored
        >>> path = tempfile.mkdtemp() + "/ep1.pt"
        >>> manifest = stream_pt({"state": {"model": {"w": as_stored(torch.ones(2))}}}, path)
        >>> torch.load(path, weights_only=True)["state"]["model"]["w"]
        tensor([1., 1.])
    """
    refuse_unfit(tree, "pt", path)
    plain, kinds = encode(tree)
    notes = {"torch_version": str(torch.__version__), **(info or {}), **notes_of(kinds)}
    pickled, storages = _pickle(plain)
    rehearsal = rehearse(pickled, record_unknown=True)
    if rehearsal.unknown_globals:
        raise more_than_data(os.fspath(path), f"objects of {', '.join(sorted(rehearsal.unknown_globals)[:10])}")
    hashes: dict[str, str] = {}
    with open(path, "w+b") as file:
        with zipfile.ZipFile(file, "w") as archive:
            _write_member(archive, "data.pkl", memoryview(pickled))
            _write_member(archive, "byteorder", memoryview(sys.byteorder.encode()))
            for key, tensor in storages.items():
                name = f"{PAYLOAD_FOLDER}{key}"
                hashes[name] = _write_member(archive, name, tensor_bytes(tensor.read()), hash_name)
                if progress is not None:
                    progress(tensor.size_bytes)
            _write_member(archive, "version", memoryview(b"3\n"))
        manifest = _describe(os.fspath(path), pickled, hashes, hash_name, notes)
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr(zipfile.ZipInfo(f"{_FOLDER}/{MANIFEST_NAME}"), manifest.to_json())
            archive.comment = EMPTY_SEAL
        file.flush()
        with FileReader(path) as reader:
            end = seal(reader, read_zip_layout(reader))
        file.seek(-len(end), os.SEEK_END)
        file.write(end)
        file.flush()
        os.fsync(file.fileno())
    return manifest


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """Stands in a pickle for the bytes of a tensor."""

    key: str
    kind: type
    numel: int


class _Pickler(pickle.Pickler):
    """Makes of descriptions the pickle that `torch.save` makes of tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.storages: dict[str, StoredTensor] = {}
        self._known: dict[Hashable, _Storage] = {}

    def persistent_id(self, obj: Any, /) -> Any:
        return ("storage", obj.kind, obj.key, "cpu", obj.numel) if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: Any, /) -> Any:
        if isinstance(obj, torch.Tensor):
            obj = as_stored(obj)
        if not isinstance(obj, StoredTensor):
            return NotImplemented
        if obj.sparse is not None:
            coalesced = (obj.sparse.is_coalesced,) if obj.sparse.layout == torch.sparse_coo else ()
            data = (*obj.sparse.parts.values(), torch.Size(obj.shape), *coalesced)
            return _rebuild_sparse_tensor, (obj.sparse.layout, data)
        stride = tuple(torch.empty(obj.shape, device="meta").stride())
        place = (self._storage(obj), 0, obj.shape, stride, False, OrderedDict())
        if obj.dtype in _STORAGES:
            return _rebuild_tensor_v2, place
        return _rebuild_tensor_v3, (*place, obj.dtype)

    def _storage(self, tensor: StoredTensor) -> _Storage:
        own = tensor if tensor.storage is None or not tensor.numel else (tensor.storage, tensor.dtype, tensor.shape)
        if own not in self._known:
            key = str(len(self.storages))
            kind = _STORAGES.get(tensor.dtype)
            numel = tensor.numel if kind is not None else tensor.size_bytes
            self._known[own] = _Storage(key, cast("type", kind or torch.UntypedStorage), numel)
            self.storages[key] = tensor
        return self._known[own]


def _pickle(tree: Any) -> tuple[bytes, dict[str, StoredTensor]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(tree)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise more_than_data("the file", f"what cannot be saved ({error!s:.200})") from error
    return file.getvalue(), pickler.storages


def _write_member(archive: zipfile.ZipFile, name: str, data: memoryview, hash_name: str = HASH_NAME) -> str:
    """Append a member whose bytes begin at a multiple of 64; return their hash."""
    entry = zipfile.ZipInfo(f"{_FOLDER}/{name}")  # dated 1980, so that equal states make equal files
    entry.file_size = data.nbytes
    is_wide = data.nbytes * 1.05 > zipfile.ZIP64_LIMIT
    begin = archive.start_dir + _LOCAL_HEADER_BYTES + len(entry.filename.encode()) + is_wide * _WIDE_FIELD_BYTES + 4
    padding = -begin % _ALIGNMENT
    entry.extra = struct.pack("<2H", _PADDING_KIND, padding) + b"Z" * padding
    hasher = new_hasher(hash_name)
    with archive.open(entry, "w", force_zip64=is_wide) as member:
        for start in range(0, data.nbytes, _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            hasher.update(piece)
            member.write(piece)
    return hasher.hexdigest()


def _describe(
    path: str, pickled: bytes, hashes: Mapping[str, str], hash_name: str, info: Mapping[str, Any]
) -> Manifest:
    with FileReader(path) as reader:
        layout = read_zip_layout(reader)
        members = {name: layout.members[name] for name in hashes}
        known = {(member.offset, member.size_bytes): hashes[name] for name, member in members.items()}
        return make_manifest(layout, rehearse(pickled), Hashes(reader, known, hash_name), info)
