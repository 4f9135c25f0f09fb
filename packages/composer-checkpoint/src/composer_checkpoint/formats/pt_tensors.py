"""Tensor-by-tensor reader and writer of `.pt` files; nothing of their pickles is ever run."""

import io
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch._utils import (
    _rebuild_sparse_tensor,  # pyright: ignore[reportPrivateUsage]
    _rebuild_tensor_v2,  # pyright: ignore[reportPrivateUsage]
    _rebuild_tensor_v3,  # pyright: ignore[reportPrivateUsage]
)
from torch.serialization import _open_zipfile_writer_buffer  # pyright: ignore[reportPrivateUsage]

from composer_checkpoint._pickle_inspection import (
    STORAGE_DTYPES,
    Dtype,
    PickleInspection,
    SparseSpec,
    TensorSpec,
    inspect_pickle,
    plain_value,
    read_legacy_pt,
    safe_unpickle,
)
from composer_checkpoint._tree import Names, decode, encode, map_tree, noted_in, notes_of
from composer_checkpoint.errors import IncompatibleCheckpointError
from composer_checkpoint.file_io import HASH_NAME, FileReader, HashingFile, tensor_bytes
from composer_checkpoint.formats._unsupported import refuse_unfit
from composer_checkpoint.formats.archives import format_of, plain_file
from composer_checkpoint.formats.pt import append_manifest, open_pt, unsafe_objects
from composer_checkpoint.formats.tensor_source import SparseParts, StoredTensor, TensorSource, as_stored, sparse_stored
from composer_checkpoint.manifest import PAYLOAD_FOLDER, Manifest

__all__ = ["open_pt_source", "read_bytes", "stream_pt"]


def open_pt_source(path: str, *, record_unknown: bool = False, drop_attributes: bool = False) -> TensorSource:
    """Open a file of any version of `torch.save`, or a plain pickle of arrays.

    Args:
        path: Path of the file, which may be a tar archive or compressed.
        record_unknown: Whether to open a file with more than data too, with inert objects in place of the unknown
            ones; `unsafe_globals` lists them.
        drop_attributes: Whether to read tensors with Python attributes, without the attributes.
    """
    with ExitStack() as opened:  # an archive is unpacked once, and its content deleted when the source is closed
        reader = opened.enter_context(FileReader(opened.enter_context(plain_file(path))))
        match format_of(reader):
            case "pt":
                contents = open_pt(reader, record_unknown=record_unknown)
                members, inspection = contents.layout.members, contents.rehearsal
                order = members.get("byteorder")
                written = sys.byteorder.encode() if order is None else reader.read(order.offset, order.size_bytes)
                if written != sys.byteorder.encode():
                    raise IncompatibleCheckpointError(
                        f"the file was written on a machine with {written.decode(errors='replace')!r:.20}-endian "
                        f"numbers, and this one has {sys.byteorder}. Load it with torch.load and save it again."
                    )
                if drop_attributes:
                    # A second time, since `open_pt` takes tensors with attributes for unknown objects.
                    pickled = members["data.pkl"]
                    data = reader.read(pickled.offset, pickled.size_bytes)
                    inspection = inspect_pickle(data, record_unknown=True, drop_attributes=True)
                offsets = {key: members[f"{PAYLOAD_FOLDER}{key}"].offset for key in inspection.storages}
                source = _source(reader, inspection, offsets, contents.manifest)
            case "legacy pt":
                inspection = read_legacy_pt(reader, record_unknown=record_unknown)
                source = _source(reader, inspection, inspection.offsets, None)
            case _:
                source = _source_of_pickle(reader, record_unknown)
        source.size_bytes = os.path.getsize(path)
        source.on_close(opened.pop_all())
        return source


def read_bytes(reader: FileReader, offset: int, size_bytes: int) -> torch.Tensor:
    """Return a byte range of a file as a `uint8` tensor, read directly into its memory."""
    buffer = torch.empty(size_bytes, dtype=torch.uint8)
    if size_bytes:
        reader.read_into(memoryview(cast(Any, buffer.numpy())), offset)
    return buffer


def _source(
    reader: FileReader, rehearsal: PickleInspection, offsets: Mapping[str, int], manifest: Manifest | None
) -> TensorSource:
    kinds, names = noted_in(manifest)
    tree = _plain(rehearsal.tree, lambda spec: _stored(reader, offsets, spec))
    tree = decode(_arrays_back(tree, kinds, names), kinds, names)
    return TensorSource(
        "pt", tree, reader.size_bytes, manifest, unsafe_globals=tuple(sorted(rehearsal.unknown_globals))
    )


def _arrays_back(tree: Any, kinds: Mapping[str, Any], names: Callable[[], Names]) -> Any:
    """Read the tensors that stand for NumPy arrays, which are small, and convert them back."""
    if "ndarray" not in kinds.values():
        return tree

    def change(name: str, value: Any) -> Any:
        is_array = isinstance(value, StoredTensor) and kinds.get(name) == "ndarray"
        return value.read() if is_array else value

    return map_tree(tree, change, shared=True, names=names())


def _stored(reader: FileReader, offsets: Mapping[str, int], spec: TensorSpec) -> StoredTensor:
    dtype = getattr(torch, spec.dtype.name)
    # Part of the key since storages are numbered from 0 in every file, and per-rank files are merged.
    where = (reader.path, spec.storage.key, spec.offset, spec.stride, spec.is_conj, spec.is_neg)
    offset, in_a_row = offsets[spec.storage.key], spec.byte_range

    def fetch_range(start: int, count: int) -> torch.Tensor:
        assert in_a_row is not None
        _refuse_quantized(spec)
        size = spec.dtype.item_bytes
        return _resolved(spec, read_bytes(reader, offset + in_a_row[0] + start * size, count * size).view(dtype))

    return StoredTensor(
        dtype,
        spec.shape,
        lambda: _resolved(spec, _read(reader, offset, spec, dtype)),
        where,
        fetch_range if in_a_row else None,
    )


def _resolved(spec: TensorSpec, elements: torch.Tensor) -> torch.Tensor:
    """Apply the lazy conjugation and negation that the tensor had when it was saved."""
    conjugated = elements.conj_physical() if spec.is_conj else elements
    return -conjugated if spec.is_neg else conjugated


def _read(reader: FileReader, storage_offset: int, spec: TensorSpec, dtype: torch.dtype) -> torch.Tensor:
    _refuse_quantized(spec)
    if not spec.size_bytes:
        return torch.empty(spec.shape, dtype=dtype)
    if spec.byte_range is not None:
        start, end = spec.byte_range
        return read_bytes(reader, storage_offset + start, end - start).view(dtype).reshape(spec.shape)
    # Not contiguous: read the range that the strides span, and gather from it.
    last = sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
    start, count = spec.offset * spec.dtype.item_bytes, (last + 1) * spec.dtype.item_bytes
    around = read_bytes(reader, storage_offset + start, count).view(dtype)
    return around.as_strided(spec.shape, spec.stride).contiguous()


def _refuse_quantized(spec: TensorSpec) -> None:
    if spec.dtype.name.startswith("q"):
        raise IncompatibleCheckpointError(
            f"a tensor is {spec.dtype.name}, and quantized tensors cannot be read singly. Load the file with "
            f"load_file() and dequantize it."
        )


def _plain(tree: Any, stored: Callable[[TensorSpec], StoredTensor]) -> Any:
    """Return the tree with real objects in place of the descriptions that the inspection made."""

    def change(_: str, value: Any) -> Any:
        match value:
            case TensorSpec():
                return stored(value)
            case SparseSpec():
                parts = {name: stored(part) for name, part in value.parts.items()}
                layout = getattr(torch, value.layout)
                return sparse_stored(value.shape, SparseParts(layout, parts, value.is_coalesced))
            case Dtype():
                return getattr(torch, value.name)
            case _:
                return plain_value(value)

    return map_tree(tree, change, shared=True)


def _source_of_pickle(reader: FileReader, record_unknown: bool) -> TensorSource:
    """Open a plain pickle, all of which is read into memory since its arrays are inside the pickle."""
    data = reader.read(0, reader.size_bytes)
    rehearsal = inspect_pickle(data, record_unknown=True)
    if rehearsal.unknown_globals and record_unknown:
        tree: Any = None
    else:
        tree = safe_unpickle(data)
    stored = map_tree(tree, lambda _, value: as_stored(value) if isinstance(value, torch.Tensor) else value)
    unsafe = tuple(sorted(rehearsal.unknown_globals)) if record_unknown else ()
    return TensorSource("pickle", stored, reader.size_bytes, unsafe_globals=unsafe)


# Classes that name a storage's dtype in a pickle. Newer dtypes have none, and are named next to untyped bytes.
_STORAGES: Mapping[torch.dtype, type] = {
    getattr(torch, dtype): getattr(torch, kind)
    for kind, (dtype, _) in STORAGE_DTYPES.items()
    if not dtype.startswith("q")
}


def stream_pt(
    tree: Any,
    path: str | os.PathLike[str],
    *,
    info: Mapping[str, Any] | None = None,
    hash_name: str = HASH_NAME,
    progress: Callable[[int], object] | None = None,
) -> Manifest:
    """Write a tree to one file for `torch.load` and `load_file`, reading each tensor only when it is written.

    The file has a manifest and a seal, like those of `save_file`. Tensors that are one storage are written once, and
    stay one. The file is written in place, as by `save_file`.

    Args:
        tree: Dicts, lists and tuples of `StoredTensor`s, tensors, numbers, strings and `None`.
        path: Path of the file.
        info: Further entries of the manifest.
        hash_name: As for `save_file`.
        progress: Called with the number of bytes after each tensor.

    Returns:
        The manifest.

    Raises:
        IncompatibleCheckpointError: If a tensor is quantized.
        UnsafeCheckpointError: If the tree has anything other than data.

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
    rehearsal = inspect_pickle(pickled, record_unknown=True)
    if rehearsal.unknown_globals:
        raise unsafe_objects(os.fspath(path), f"objects of {', '.join(sorted(rehearsal.unknown_globals)[:10])}")
    with HashingFile(os.fspath(path), hash_name) as file:
        # The writer behind `torch.save`, which itself would need all tensors in memory.
        with _open_zipfile_writer_buffer(cast("IO[bytes]", file)) as archive:
            writer = cast("Any", archive)
            writer.write_record("data.pkl", pickled, len(pickled))
            writer.write_record("byteorder", sys.byteorder, len(sys.byteorder))
            for key, tensor in storages.items():
                data = tensor_bytes(tensor.read())
                # frombuffer() refuses empty buffers.
                elements = torch.frombuffer(data, dtype=torch.uint8) if data.nbytes else torch.empty(0)
                writer.write_record(f"{PAYLOAD_FOLDER}{key}", elements.untyped_storage(), tensor.size_bytes)
                if progress is not None:
                    progress(tensor.size_bytes)
        file.raise_failure()
        return append_manifest(file, os.fspath(path), notes, hash_name)[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """Placeholder in a pickle for the bytes of a tensor."""

    key: str
    kind: type
    numel: int


class _Pickler(pickle.Pickler):
    """Pickler that writes descriptions of tensors as `torch.save` writes tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)  # as torch.save
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
        # Contiguous strides, without allocating memory.
        stride = tuple(torch.empty(obj.shape, device="meta").stride())
        place = (self._storage(obj), 0, obj.shape, stride, False, OrderedDict())
        if obj.dtype in _STORAGES:
            return _rebuild_tensor_v2, place
        return _rebuild_tensor_v3, (*place, obj.dtype)

    def _storage(self, tensor: StoredTensor) -> _Storage:
        # Names of one tensor share a storage. Empty tensors may have equal keys without being one tensor.
        own = tensor if tensor.storage is None or not tensor.numel else (tensor.storage, tensor.dtype, tensor.shape)
        if own not in self._known:
            key = str(len(self.storages))
            kind = _STORAGES.get(tensor.dtype)
            numel = tensor.numel if kind is not None else tensor.size_bytes  # an untyped storage counts bytes
            self._known[own] = _Storage(key, cast("type", kind or torch.UntypedStorage), numel)
            self.storages[key] = tensor
        return self._known[own]


def _pickle(tree: Any) -> tuple[bytes, dict[str, StoredTensor]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(tree)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise unsafe_objects("the file", f"what cannot be saved ({error!s:.200})") from error
    return file.getvalue(), pickler.storages
