"""Inspection of checkpoints, which neither reads their tensors nor runs anything from them."""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from composer_checkpoint._pickle_inspection import PickleInspection, inspect_pickle, read_legacy_pt
from composer_checkpoint._tree import text_of
from composer_checkpoint.file_io import FileReader
from composer_checkpoint.formats.archives import Format, format_of, plain_file
from composer_checkpoint.formats.pt import open_pt
from composer_checkpoint.formats.safetensors import read_safetensors
from composer_checkpoint.manifest import Manifest
from composer_checkpoint.sharded._storage import LocalSource
from composer_checkpoint.sharded.reader import read_folder_metadata, read_manifest

__all__ = ["FileDescription", "TensorDescription", "describe_folder", "inspect_file"]


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """Geometry of one tensor. A sparse one has the dtype of its values, and its bytes include the indices."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    layout: str = "strided"


@dataclass(frozen=True, slots=True)
class FileDescription:
    """Content of a file, or of the folder of a sharded checkpoint.

    `keys` has the top-level keys and those of the state, as `state/model`. `unsafe_globals` has the globals beyond data
    that the file refers to, such as `os.system`; if there are any, `load_file` refuses the file.
    """

    format: Format | Literal["sharded"]
    size_bytes: int
    keys: tuple[str, ...]
    tensors: Mapping[str, TensorDescription]
    manifest: Manifest | None = None
    unsafe_globals: tuple[str, ...] = field(default=())


def inspect_file(path: str | os.PathLike[str]) -> FileDescription:
    """Describe a file, even one with code, which is not run, or the folder of a sharded checkpoint.

    Of a folder, only the index is read, not the shards.

    Raises:
        NoCheckpointError: If the path does not exist, or the folder has no index.
        CorruptCheckpointError: If the file is not whole.
        UnsafeCheckpointError: If its pickle has instructions that no checkpoint needs.
    """
    if os.path.isdir(path):
        return describe_folder(path)
    with plain_file(os.fspath(path)) as plain, FileReader(plain) as reader:
        kind, size_bytes = format_of(reader), os.path.getsize(path)
        if kind == "safetensors":
            header, manifest = read_safetensors(reader)
            tensors = {
                name: TensorDescription(slot.dtype, slot.shape, slot.size_bytes)
                for name, slot in header.tensors.items()
            }
            return FileDescription(kind, size_bytes, tuple(tensors), tensors, manifest)
        if kind == "pt":
            contents = open_pt(reader, record_unknown=True)
            return _describe(kind, size_bytes, contents.rehearsal, contents.manifest)
        if kind == "legacy pt":
            rehearsal = read_legacy_pt(reader, record_unknown=True)
        else:
            rehearsal = inspect_pickle(reader.read(0, reader.size_bytes), record_unknown=True)
        return _describe(kind, size_bytes, rehearsal, None)


def _describe(kind: Format, size_bytes: int, rehearsal: PickleInspection, manifest: Manifest | None) -> FileDescription:
    # A sparse tensor is listed once, not by its components.
    parts = {id(part) for sparse in rehearsal.sparse.values() for part in sparse.parts.values()}
    tensors = {
        name: TensorDescription(tensor.dtype.name, tensor.shape, tensor.size_bytes)
        for name, tensor in rehearsal.tensors.items()
        if id(tensor) not in parts
    }
    for name, sparse in rehearsal.sparse.items():
        tensors[name] = TensorDescription(sparse.dtype.name, sparse.shape, sparse.size_bytes, sparse.layout)
    keys = _keys(rehearsal.tree)
    return FileDescription(kind, size_bytes, keys, tensors, manifest, tuple(sorted(rehearsal.unknown_globals)))


def _keys(tree: Any) -> tuple[str, ...]:
    if not isinstance(tree, dict):
        return ()
    below = tree.get("state")
    inner = [f"state/{text_of(key)}" for key in below] if isinstance(below, dict) else []
    return (*map(text_of, tree), *inner)


def describe_folder(folder: str | os.PathLike[str]) -> FileDescription:
    """Describe a folder that DCP wrote.

    Raises:
        NoCheckpointError: If the folder has no `.metadata`.
        CorruptCheckpointError: If `.metadata` is inconsistent, or files are missing or cut short.
        UnsafeCheckpointError: If `.metadata` has more than data.
    """
    metadata = read_folder_metadata(folder)
    tensors: dict[str, TensorDescription] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            dtype, shape = entry.properties.dtype, tuple(entry.size)
            tensors[name] = TensorDescription(
                str(dtype).removeprefix("torch."), shape, math.prod(shape) * dtype.itemsize
            )
    paths = metadata.planner_data or {name: (name,) for name in metadata.state_dict_metadata}
    size_bytes = sum(path.stat().st_size for path in Path(folder).iterdir() if path.is_file())
    return FileDescription(
        "sharded", size_bytes, _keys_of_paths(paths.values()), tensors, read_manifest(LocalSource(Path(folder)))
    )


def _keys_of_paths(paths: Iterable[tuple[object, ...]]) -> tuple[str, ...]:
    """Return the top-level keys and those below `state`, without duplicates."""
    paths = list(paths)
    below = [f"state/{path[1]}" for path in paths if path[0] == "state" and len(path) > 1]
    return tuple(dict.fromkeys([*(str(path[0]) for path in paths), *below]))
