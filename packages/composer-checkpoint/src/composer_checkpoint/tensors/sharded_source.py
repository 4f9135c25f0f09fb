"""Reading the folder of a sharded checkpoint tensor by tensor, each put together from its parts."""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from composer_checkpoint._tree import map_tree
from composer_checkpoint.errors import CorruptCheckpointError
from composer_checkpoint.sharded._parts import OpenShards, Part, list_parts
from composer_checkpoint.sharded.reader import VerifyingReader
from composer_checkpoint.tensors.source import StoredTensor, TensorSource, as_stored

__all__ = ["open_sharded_source"]

_MAX_DEPTH = 200


def open_sharded_source(folder: str | os.PathLike[str]) -> TensorSource:
    """Open a folder that DCP wrote. Its shards are read when their tensors are.

    Raises:
        NoCheckpointError: If there is no `.metadata` in it.
        CorruptCheckpointError: If it describes what cannot be, or files are missing or cut short.
        UnsafeCheckpointError: If it asks for anything that a checkpoint does not need.
    """
    reader = VerifyingReader(folder, verify=False)
    metadata = reader.read_metadata()
    parts = list_parts(metadata)
    shards = OpenShards(reader.source)
    sizes = {file: Path(folder, file).stat().st_size for file in sorted({part.file for part in parts.values()})}
    try:
        tree = _tree(metadata, parts, shards)
    except BaseException:
        shards.__exit__()
        raise
    source = TensorSource("dcp", tree, sum(sizes.values()), reader.manifest, files=sizes)
    source.on_close(_Closing(shards))
    return source


class _Closing:
    def __init__(self, shards: OpenShards) -> None:
        self._shards = shards

    def close(self) -> None:
        self._shards.__exit__()


def _tree(metadata: Metadata, parts: dict[MetadataIndex, Part], shards: OpenShards) -> Any:
    root: dict[Any, Any] = {}
    empty: list[tuple[tuple[str | int, ...], Any]] = []
    paths = metadata.planner_data or {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            value: Any = _stored(fqn, entry, parts, shards)
        else:
            item = shards.check(parts[MetadataIndex(fqn)], None)
            value = map_tree(item, lambda _, leaf: as_stored(leaf) if isinstance(leaf, torch.Tensor) else leaf)
        path = paths.get(fqn, (fqn,))
        if isinstance(value, dict | list) and not value:
            empty.append((path, value))
        else:
            _put(root, path, value)
    # A container that is empty on one rank is an entry, and so is each item that it has on another rank.
    for path, value in empty:
        if not _has_items(root, path):
            _put(root, path, value)
    return _with_lists(root)


def _has_items(root: dict[Any, Any], path: tuple[str | int, ...]) -> bool:
    here: Any = root
    for step in path:
        here = here.get(step) if isinstance(here, dict) else None
    return isinstance(here, dict)


def _stored(
    fqn: str, entry: TensorStorageMetadata, parts: dict[MetadataIndex, Part], shards: OpenShards
) -> StoredTensor:
    dtype, shape = entry.properties.dtype, tuple(entry.size)

    def fetch() -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for chunk in entry.chunks:
            part = parts[MetadataIndex(fqn, chunk.offsets)]
            region = whole
            for dim, (start, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                region = region.narrow(dim, start, length)
            shards.check(part, None)
            shards.read(part, (0,) * len(chunk.sizes), tuple(chunk.sizes), region)
        return whole

    return StoredTensor(dtype, shape, fetch)


class _List(dict[int, Any]):
    """A list whose items come in any order."""


def _put(root: dict[Any, Any], path: tuple[str | int, ...], value: Any) -> None:
    here: Any = root
    for step, following in pairwise(path):
        here = here.setdefault(step, _List() if isinstance(following, int) else {}) if isinstance(here, dict) else None
    if not isinstance(here, dict) or path[-1] in here or len(path) > _MAX_DEPTH:
        raise CorruptCheckpointError(
            f"`.metadata` has an entry at {'/'.join(map(str, path[:10]))!r:.200}, {len(path)} levels deep, where "
            f"another one is, or deeper than in any checkpoint. Load another checkpoint."
        )
    here[path[-1]] = value


def _with_lists(value: Any) -> Any:
    """Return the tree with real lists. It is as deep as the checked paths are long, which are short."""
    if isinstance(value, _List):
        return [_with_lists(value[index]) for index in sorted(value)]
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return value
