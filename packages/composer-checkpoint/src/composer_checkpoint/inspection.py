"""Inspection of checkpoints, which neither reads their tensors nor runs anything from them."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from composer_checkpoint._tree import text_of
from composer_checkpoint.formats.archives import Format, final_name, plain_file
from composer_checkpoint.formats.pt import open_pt_source
from composer_checkpoint.formats.safetensors import open_safetensors_source
from composer_checkpoint.formats.tensor_source import StoredTensor
from composer_checkpoint.manifest import Manifest
from composer_checkpoint.sharded._storage import LocalSource
from composer_checkpoint.sharded.reader import read_folder_metadata, read_manifest


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
        return _describe_folder(path)
    place = os.fspath(path)
    if final_name(place).endswith(".safetensors"):
        with plain_file(place), open_safetensors_source(place) as source:  # names the file in errors
            tensors = _describe(source.weights)
            return FileDescription("safetensors", source.size_bytes, tuple(tensors), tensors, source.manifest)
    with open_pt_source(place, record_unknown=True) as source:
        kind, keys, tensors = cast(Format, source.format), _keys(source.tree), _describe(source.tensors)
        return FileDescription(kind, source.size_bytes, keys, tensors, source.manifest, source.unsafe_globals)


def _describe(tensors: Mapping[str, StoredTensor]) -> dict[str, TensorDescription]:
    return {
        name: TensorDescription(
            str(tensor.dtype).removeprefix("torch."),
            tensor.shape,
            tensor.size_bytes,
            "strided" if tensor.sparse is None else str(tensor.sparse.layout).removeprefix("torch."),
        )
        for name, tensor in tensors.items()
    }


def _keys(tree: Any) -> tuple[str, ...]:
    if not isinstance(tree, dict):
        return ()
    below = tree.get("state")
    inner = [f"state/{text_of(key)}" for key in below] if isinstance(below, dict) else []
    return (*map(text_of, tree), *inner)


def _describe_folder(folder: str | os.PathLike[str]) -> FileDescription:
    metadata = read_folder_metadata(folder)
    tensors: dict[str, TensorDescription] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            dtype, shape = entry.properties.dtype, tuple(entry.size)
            tensors[name] = TensorDescription(
                str(dtype).removeprefix("torch."), shape, math.prod(shape) * dtype.itemsize
            )
    paths = (metadata.planner_data or {name: (name,) for name in metadata.state_dict_metadata}).values()
    below = [f"state/{path[1]}" for path in paths if path[0] == "state" and len(path) > 1]
    keys = tuple(dict.fromkeys([*(str(path[0]) for path in paths), *below]))
    size_bytes = sum(path.stat().st_size for path in Path(folder).iterdir() if path.is_file())
    return FileDescription("sharded", size_bytes, keys, tensors, read_manifest(LocalSource(Path(folder))))
