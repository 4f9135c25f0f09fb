"""Reading a `.pt` file tensor by tensor: its pickle is only rehearsed, and nothing of it is ever run."""

import mmap
import struct
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from composer_checkpoint._encoding import decode, noted_in
from composer_checkpoint._file_reader import FileReader
from composer_checkpoint._formats import format_of
from composer_checkpoint._legacy_pt import read_legacy_bytes
from composer_checkpoint._pickle_calls import Call
from composer_checkpoint._pickled_arrays import plain_array, safe_unpickle
from composer_checkpoint._rehearsal import Dtype, Rehearsal, SparseSpec, TensorSpec, rehearse
from composer_checkpoint._tree import Names, map_tree
from composer_checkpoint.errors import IncompatibleCheckpointError
from composer_checkpoint.manifest import Manifest
from composer_checkpoint.pt_file import open_pt
from composer_checkpoint.tensors._parameter_pickles import rehearse_with_attributes
from composer_checkpoint.tensors._sparse_parts import SparseParts
from composer_checkpoint.tensors.source import StoredTensor, TensorSource, as_stored, sparse_stored
from composer_checkpoint.unpickler import PickledOrderedDict, scan

__all__ = ["open_pt_source", "read_bytes"]

_LEGACY_LEADING_PICKLES = 3  # the magic number, the version, and the writer's byte order and sizes


def open_pt_source(path: str, *, record_unknown: bool = False, drop_attributes: bool = False) -> TensorSource:
    """Open what `torch.save` wrote, of any version, or a plain pickle of arrays.

    Args:
        path: The file, not packed.
        record_unknown: Open also a file that asks for more than data, with inert objects in the places of what it asks
            for; `unsafe_globals` lists them.
        drop_attributes: Read tensors that have attributes of their own without these.

    Raises:
        CorruptCheckpointError: If it is not whole.
        UnsafeCheckpointError: If it asks for more than data.
    """
    reader = FileReader(path)
    try:
        match format_of(reader):
            case "pt":
                contents = open_pt(reader, record_unknown=record_unknown)
                members, rehearsal = contents.layout.members, contents.rehearsal
                _check_byteorder(reader, members.get("byteorder"))
                if drop_attributes:
                    pickled = members["data.pkl"]
                    rehearsal = rehearse_with_attributes(reader.read(pickled.offset, pickled.size_bytes))
                offsets = {key: members[f"data/{key}"].offset for key in rehearsal.storages}
                return _source(reader, rehearsal, offsets, contents.manifest)
            case "legacy pt":
                return _source(reader, *_read_legacy(reader, record_unknown), None)
            case _:
                return _source_of_pickle(reader, record_unknown)
    except BaseException:
        reader.close()
        raise


def read_bytes(reader: FileReader, offset: int, size_bytes: int) -> torch.Tensor:
    """Return bytes of a file as a tensor of bytes, read straight into its memory."""
    buffer = torch.empty(size_bytes, dtype=torch.uint8)
    if size_bytes:
        reader.read_into(memoryview(cast(Any, buffer.numpy())), offset)
    return buffer


def _source(
    reader: FileReader, rehearsal: Rehearsal, offsets: Mapping[str, int], manifest: Manifest | None
) -> TensorSource:
    kinds, names = noted_in(manifest)
    tree = _plain(rehearsal.tree, lambda spec: _stored(reader, offsets, spec))
    tree = decode(_arrays_back(tree, kinds, names), kinds, names)
    source = TensorSource(
        "pt", tree, reader.size_bytes, manifest, unsafe_globals=tuple(sorted(rehearsal.unknown_globals))
    )
    source.on_close(reader)
    return source


def _arrays_back(tree: Any, kinds: Mapping[str, Any], names: Callable[[], Names]) -> Any:
    """Read the tensors that stand for NumPy arrays, which are small and are turned back."""
    if "ndarray" not in kinds.values():
        return tree

    def change(name: str, value: Any) -> Any:
        is_array = isinstance(value, StoredTensor) and kinds.get(name) == "ndarray"
        return value.read() if is_array else value

    return map_tree(tree, change, shared=True, names=names())


def _stored(reader: FileReader, offsets: Mapping[str, int], spec: TensorSpec) -> StoredTensor:
    dtype = getattr(torch, spec.dtype.name)
    # Every file numbers its storages from 0.
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
    """Conjugate and negate what the file has as it was before."""
    conjugated = elements.conj_physical() if spec.is_conj else elements
    return -conjugated if spec.is_neg else conjugated


def _read(reader: FileReader, storage_offset: int, spec: TensorSpec, dtype: torch.dtype) -> torch.Tensor:
    _refuse_quantized(spec)
    if not spec.size_bytes:
        return torch.empty(spec.shape, dtype=dtype)
    if spec.byte_range is not None:
        start, end = spec.byte_range
        return read_bytes(reader, storage_offset + start, end - start).view(dtype).reshape(spec.shape)
    last = sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
    start, count = spec.offset * spec.dtype.item_bytes, (last + 1) * spec.dtype.item_bytes
    around = read_bytes(reader, storage_offset + start, count).view(dtype)
    return around.as_strided(spec.shape, spec.stride).contiguous()


def _refuse_quantized(spec: TensorSpec) -> None:
    if spec.dtype.name.startswith("q"):
        raise IncompatibleCheckpointError(
            f"a tensor is {spec.dtype.name}, and quantized tensors are not read one by one. Load the file with "
            f"load_file() and dequantize it."
        )


def _plain(tree: Any, stored: Callable[[TensorSpec], StoredTensor]) -> Any:
    """Return the tree with the real things in the places of those that were built with checks."""

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
            case PickledOrderedDict():
                ordered = OrderedDict(value)
                vars(ordered).update(vars(value))
                return ordered
            case Counter():
                return Counter(value)
            case deque():
                return deque(map(plain_array, value), value.maxlen)
            case _:
                return Call.itself(plain_array(value))

    return map_tree(tree, change, shared=True)


def _read_legacy(reader: FileReader, record_unknown: bool) -> tuple[Rehearsal, dict[str, int]]:
    """Return what a file of torch before 1.6 holds, and where each storage's elements begin."""
    with mmap.mmap(reader.descriptor, reader.size_bytes, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped)
        try:
            rehearsal = read_legacy_bytes(view, record_unknown=record_unknown)  # checks all that follows, too
            position = 0
            for _ in range(_LEGACY_LEADING_PICKLES + 1):
                position = scan(view, position)
            end = scan(view, position)
            keys = rehearse(bytes(view[position:end])).tree
        finally:
            view.release()
    offsets: dict[str, int] = {}
    for key in keys:
        offsets[key] = end + struct.calcsize("<q")
        end = offsets[key] + rehearsal.storages[key].size_bytes
    return rehearsal, offsets


def _source_of_pickle(reader: FileReader, record_unknown: bool) -> TensorSource:
    """Open a plain pickle, whose arrays are inside it, so that all of it is in memory."""
    data = reader.read(0, reader.size_bytes)
    rehearsal = rehearse(data, record_unknown=True)
    if rehearsal.unknown_globals and record_unknown:
        tree: Any = None
    else:
        tree = safe_unpickle(data)
    stored = map_tree(tree, lambda _, value: as_stored(value) if isinstance(value, torch.Tensor) else value)
    unsafe = tuple(sorted(rehearsal.unknown_globals)) if record_unknown else ()
    source = TensorSource("pickle", stored, reader.size_bytes, unsafe_globals=unsafe)
    source.on_close(reader)
    return source


def _check_byteorder(reader: FileReader, member: Any) -> None:
    written = (
        sys.byteorder if member is None else reader.read(member.offset, member.size_bytes).decode(errors="replace")
    )
    if written != sys.byteorder:
        raise IncompatibleCheckpointError(
            f"the file was written on a machine with {written!r:.20}-endian numbers, and this one has {sys.byteorder}. "
            f"Load it with torch.load and save it again."
        )
