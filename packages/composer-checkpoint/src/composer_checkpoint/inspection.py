"""What a checkpoint holds, without reading its tensors and without running anything of it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from composer_checkpoint._file_reader import FileReader
from composer_checkpoint._formats import Format, format_of, plain_file
from composer_checkpoint._legacy_pt import read_legacy_pt
from composer_checkpoint._rehearsal import Rehearsal, rehearse
from composer_checkpoint._tree import text_of
from composer_checkpoint.manifest import Manifest
from composer_checkpoint.pt_file import open_pt
from composer_checkpoint.safetensors_file import read_safetensors

__all__ = ["FileDescription", "TensorDescription", "inspect_file"]


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """How one tensor looks. A sparse one has the dtype of its values, and the bytes of its indices, too."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    layout: str = "strided"


@dataclass(frozen=True, slots=True)
class FileDescription:
    """What a file, or the folder of a sharded checkpoint, holds.

    `keys` has the top-level keys, and below `state` those of the state, as `state/model`. `unsafe_globals` has what
    the file asks for beyond data, such as `os.system`; where it is not empty, `load_file` refuses the file.
    """

    format: Format | Literal["sharded"]
    size_bytes: int
    keys: tuple[str, ...]
    tensors: Mapping[str, TensorDescription]
    manifest: Manifest | None = None
    unsafe_globals: tuple[str, ...] = field(default=())


def inspect_file(path: str | os.PathLike[str]) -> FileDescription:
    """Describe a file, also one that asks for code, which is not run; or the folder of a sharded checkpoint.

    Of a folder, the index is read, not the shards.

    Raises:
        NoCheckpointError: If there is none, or the folder has no index.
        CorruptCheckpointError: If the file is not whole.
        UnsafeCheckpointError: If its pickle has instructions that none needs.
    """
    if os.path.isdir(path):
        from composer_checkpoint.sharded.inspection import describe_folder  # it stands on this module

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
            rehearsal = rehearse(reader.read(0, reader.size_bytes), record_unknown=True)
        return _describe(kind, size_bytes, rehearsal, None)


def _describe(kind: Format, size_bytes: int, rehearsal: Rehearsal, manifest: Manifest | None) -> FileDescription:
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
