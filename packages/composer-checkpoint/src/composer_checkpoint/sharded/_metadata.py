"""Safe reader of DCP's `.metadata`, which runs nothing from the file and checks all of it.

torch reads this file with plain pickle. Here only the classes of a real `.metadata` are created, and their content is
validated and rebuilt: types and sizes, that the chunks of a tensor lie inside it, cover it and do not overlap, and
that the files have the bytes they should have.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import (
    # torch's own reader understands only these entries, so no public way exists to write a readable file.
    _StorageInfo as StorageInfo,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from composer_checkpoint._pickle_inspection import safe_unpickle
from composer_checkpoint.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError, shown

_MAX_DIMS = 64  # torch's own limit
_MAX_COUNT = 1 << 63
MAX_NAME_CHARS = 1024  # a name is repeated for each chunk
MAX_STEPS = 128
_MAX_EMPTY = 1024  # empty containers in lists, which have no entries


def parse_metadata(data: bytes, folder: str, size_bytes: Callable[[str], int | None]) -> Metadata:
    where = os.path.join(folder, ".metadata")
    try:
        raw = safe_unpickle(data, allow=_stand_ins())
    except CheckpointError as error:
        raise type(error)(f"{where}: {error}") from error
    return _Checker(folder, size_bytes).metadata(raw)


def part_name(fqn: str, chunk: ChunkStorageMetadata | None, size: torch.Size) -> str:
    """Return the name of a stored chunk of a tensor in manifests and messages.

    Example:
        >>> chunk = ChunkStorageMetadata(offsets=torch.Size([4, 0]), sizes=torch.Size([4, 8]))
        >>> part_name("weight", chunk, torch.Size([8, 8]))
        'weight[4:8, 0:8]'
        >>> part_name("weight", chunk, torch.Size([4, 8]))
        'weight'
    """
    if chunk is None or chunk.sizes == size:
        return fqn
    ranges = (f"{start}:{start + length}" for start, length in zip(chunk.offsets, chunk.sizes, strict=True))
    return f"{fqn}[{', '.join(ranges)}]"


class _Checker:
    """Validator that takes a raw `Metadata` apart and builds a new one from valid parts."""

    def __init__(self, folder: str, size_bytes: Callable[[str], int | None]) -> None:
        self._folder = folder
        self._size_bytes = cache(size_bytes)  # asked for each part

    def metadata(self, raw: object) -> Metadata:
        if not isinstance(raw, _Record) or not _is(raw, "Metadata"):
            raise self._error("it", f"is a {type(raw).__name__}", "a Metadata of torch.distributed.checkpoint")
        entries = self._mapping(raw, "state_dict_metadata")
        stored = {
            _key(index): info
            for index, info in self._mapping(raw, "storage_data").items()
            if _is(index, "MetadataIndex")
        }
        state_dict_metadata: dict[str, Any] = {}
        storage_data: dict[MetadataIndex, StorageInfo] = {}
        for fqn, entry in entries.items():
            if not _is_name(fqn):
                raise self._error("a name", f"is {_shown(fqn)}", f"a string of up to {MAX_NAME_CHARS} characters")
            if _is(entry, "BytesStorageMetadata"):
                state_dict_metadata[fqn] = BytesStorageMetadata()
                storage_data[MetadataIndex(fqn)] = self._location(stored, MetadataIndex(fqn), fqn, 0)
            else:
                state_dict_metadata[fqn] = tensor = self._tensor(fqn, entry)
                for chunk in tensor.chunks:
                    index = MetadataIndex(fqn, chunk.offsets)
                    need = math.prod(chunk.sizes) * tensor.properties.dtype.itemsize
                    name = part_name(fqn, chunk, tensor.size)
                    storage_data[index] = self._location(stored, index, name, need)
        planner_data = self._paths(_get(raw, "planner_data"), state_dict_metadata)
        meta, version = _get(raw, "storage_meta"), _get(raw, "version")
        return Metadata(
            state_dict_metadata=state_dict_metadata,
            planner_data=planner_data,
            storage_data=storage_data,
            # With the path that is read, since the folder may have been moved since the save.
            storage_meta=StorageMeta(self._folder, _text(_get(meta, "save_id"))),
            version=_text(version),
        )

    def _mapping(self, raw: object, name: str) -> Mapping[Any, Any]:
        value = _get(raw, name)
        if not isinstance(value, dict):
            raise self._error(name, f"is a {type(value).__name__}", "a dict")
        return value

    def _tensor(self, fqn: str, entry: object) -> TensorStorageMetadata:
        if not _is(entry, "TensorStorageMetadata"):
            raise self._error(repr(fqn), f"is a {type(entry).__name__}", "a description of a tensor or of bytes")
        dtype = _dtype(_get(entry, "properties"))
        if not isinstance(dtype, torch.dtype):
            raise self._error(repr(fqn), f"has dtype {shown(dtype)}", "a torch.dtype")
        size = self._dims(fqn, "shape", _get(entry, "size"))
        if math.prod(size) * dtype.itemsize >= _MAX_COUNT:
            raise self._error(repr(fqn), f"has shape {tuple(size)} of {dtype}", "fewer than 2^63 bytes")
        raw_chunks = _get(entry, "chunks")
        if not isinstance(raw_chunks, list | tuple):
            raise self._error(repr(fqn), f"has parts {shown(raw_chunks)}", "a list")
        chunks = [
            ChunkStorageMetadata(
                self._dims(fqn, "offsets of a part", _get(chunk, "offsets"), len(size)),
                self._dims(fqn, "sizes of a part", _get(chunk, "sizes"), len(size)),
            )
            for chunk in raw_chunks
        ]
        if problem := covers_exactly(size, chunks):
            raise self._error(repr(fqn), f"of shape {tuple(size)} {problem}", "parts that tile the tensor")
        return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)

    def _dims(self, fqn: str, what: str, value: object, count: int | None = None) -> torch.Size:
        dims: tuple[Any, ...] = value if isinstance(value, tuple) else ()
        counts = dims is value and all(type(dim) is int and 0 <= dim < _MAX_COUNT for dim in dims)
        if not counts or len(dims) > _MAX_DIMS or count not in (None, len(dims)):
            raise self._error(repr(fqn), f"has {what} {shown(value)}", f"{count or 'up to 64'} counts from 0 to 2^63")
        return torch.Size(dims)

    def _location(self, stored: Mapping[Any, Any], index: MetadataIndex, name: str, need_bytes: int) -> StorageInfo:
        info = stored.get(_place(index.fqn, index.offset))
        file, offset, length = (_get(info, field) for field in ("relative_path", "offset", "length"))
        if not _is_name(file) or not file or file in (".", "..") or any(mark in file for mark in "/\\\0"):
            raise self._error(
                repr(name), f"is stored in the file {_shown(file)}", "the name of a file of the same folder"
            )
        if _get(info, "transform_descriptors"):
            raise IncompatibleCheckpointError(
                f"{self._folder}: {name!r} was written through {shown(_get(info, 'transform_descriptors'))}, and only "
                f"plain files can be read. Write the checkpoint again without extensions."
            )
        # The part is an archive, so it is longer than the elements in it.
        counts = all(type(value) is int and 0 <= value < _MAX_COUNT for value in (offset, length))
        if not counts or length < need_bytes:
            raise self._error(
                repr(name),
                f"is stored in {shown(length)} bytes at offset {shown(offset)}",
                f"at least {need_bytes} bytes",
            )
        size = self._size_bytes(file)
        if size is None:
            raise CorruptCheckpointError(
                f"{self._folder} lacks the shard {file}, which holds {name!r}. Bring the file back, or load another "
                f"checkpoint."
            )
        if offset + length > size:
            raise CorruptCheckpointError(
                f"{os.path.join(self._folder, file)} has {size} bytes, but {name!r} is said to end at byte "
                f"{offset + length}: the file was cut short or is of another save. Load another checkpoint."
            )
        return StorageInfo(file, offset, length)

    def _paths(self, raw: object, entries: Mapping[str, Any]) -> dict[str, tuple[str | int, ...]] | None:
        if raw is None:
            return None
        if not isinstance(raw, dict):
            raise self._error("planner_data", f"is a {type(raw).__name__}", "a dict of paths")
        paths: dict[str, tuple[str | int, ...]] = {}
        # torch fills lists up to an index, so a huge index would exhaust memory.
        limit = len(entries) + _MAX_EMPTY
        for fqn in entries:
            path = raw.get(fqn)
            if (
                not isinstance(path, tuple)
                or not 0 < len(path) <= MAX_STEPS
                or not all(_is_name(step) or (type(step) is int and 0 <= step < limit) for step in path)
            ):
                raise self._error(repr(fqn), f"has the path {shown(path)}", "a tuple of names and small indices")
            paths[fqn] = path
        return paths

    def _error(self, what: str, found: str, expected: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{os.path.join(self._folder, '.metadata')}: {what} {found}; expected: {expected}. Load another checkpoint."
        )


class _Record:
    """Inert object in place of one of DCP's, with the state that the real object would have received."""

    state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Record) and _key(self) == _key(other)

    def __hash__(self) -> int:  # the keys of `storage_data` are such objects
        return hash(_key(self))


def _stand_ins() -> dict[str, Any]:
    """Return the globals that a `.metadata` of torch 2.1 or later may name.

    The classes are created on each call, since a pickle can modify them.
    """
    records = {f"{_DCP}.{name}": type(name, (_Record,), {}) for name in _RECORDS}
    records["torch.distributed._shard.sharded_tensor.metadata.TensorProperties"] = type(
        "TensorProperties", (_Record,), {}
    )
    ignored = {name: lambda *_: None for name in _IGNORED}
    dtypes = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {**records, **ignored, **dtypes, "torch.Size": lambda dims=(): tuple(dims)}


_DCP = "torch.distributed.checkpoint"
_RECORDS = (
    "metadata.Metadata",
    "metadata.TensorStorageMetadata",
    "metadata.BytesStorageMetadata",
    "metadata.ChunkStorageMetadata",
    "metadata.TensorProperties",
    "metadata.MetadataIndex",
    "metadata.StorageMeta",
    "filesystem._StorageInfo",
)
_IGNORED = (
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",  # up to torch 2.2
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",  # Python 3.13
)


def _is(value: object, name: str) -> bool:
    return isinstance(value, _Record) and type(value).__name__.rpartition(".")[2] == name


def _get(value: object, name: str) -> Any:
    """Return a field, which may be missing from a hostile pickle; `None` if it is."""
    state = value.state if isinstance(value, _Record) else None
    return state.get(name) if isinstance(state, dict) else None


def _dtype(properties: object) -> object:
    """Return the first field of a `TensorProperties`, whose state is a tuple."""
    state = properties.state if isinstance(properties, _Record) else None
    return state[0] if isinstance(state, tuple) and state else None


def _key(index: object) -> tuple[str, str | None]:
    fqn, offset = _get(index, "fqn"), _get(index, "offset")
    offsets = () if offset is None else offset
    if not _is_name(fqn) or not isinstance(offsets, tuple) or len(offsets) > _MAX_DIMS:
        raise ValueError("an index has a name and the offsets of a part")
    if not all(type(dim) is int and 0 <= dim < _MAX_COUNT for dim in offsets):
        raise ValueError("offsets are counts")
    return _place(fqn, offset)


def _place(fqn: str, offset: tuple[int, ...] | None) -> tuple[str, str | None]:
    """Return a key made of text: the hashes of numbers are predictable, so colliding keys could stall a dict."""
    return fqn, None if offset is None else ",".join(map(str, offset))


def _is_name(value: object) -> TypeGuard[str]:
    return type(value) is str and len(value) <= MAX_NAME_CHARS


def _shown(value: object) -> str:
    """Return a name for a message; it may be longer than other values."""
    return repr(value) if _is_name(value) else shown(value)


def _text(value: object) -> str | None:
    return value if type(value) is str else None


# The limit of cells per chunk of the grid that all edges of chunks span together. Meshes of devices produce about one.
_MOST_CELLS = 128


def covers_exactly(size: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> str | None:
    """Return what is wrong with the chunks of a tensor; `None` if they cover each element once."""
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    for chunk in chunks:
        if any(start + length > whole for start, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            return f"has a part at {tuple(chunk.offsets)} of sizes {tuple(chunk.sizes)} that leaves it"
    boxes = [
        [(start, start + length) for start, length in zip(chunk.offsets, chunk.sizes, strict=True)] for chunk in filled
    ]
    most = _most_in_a_cell(size, boxes)
    if most is None:
        return f"has {len(filled)} parts in no order, such as no mesh of devices makes"
    if most > 1:
        return "has overlapping parts"
    covered, whole = sum(math.prod(chunk.sizes) for chunk in filled), math.prod(size)
    return None if covered == whole else f"is covered by its parts in {covered} of {whole} elements"


def _most_in_a_cell(size: Sequence[int], boxes: Sequence[Sequence[tuple[int, int]]]) -> int | None:
    """Return the most boxes that share a cell of the grid that all edges span; `None` if it has too many cells."""
    # Where the edges lie, by the index of each in its dim.
    edges = [
        {edge: index for index, edge in enumerate(sorted({0, whole, *(edge for box in boxes for edge in box[dim])}))}
        for dim, whole in enumerate(size)
    ]
    if math.prod(map(len, edges)) > _MOST_CELLS * (len(boxes) + _MOST_CELLS):
        return None
    cells = np.zeros([max(len(of_dim) - 1, 0) for of_dim in edges], np.int64)
    for box in boxes:
        cells[tuple(slice(of_dim[start], of_dim[end]) for of_dim, (start, end) in zip(edges, box, strict=True))] += 1
    return int(cells.max()) if cells.size else 0
