"""What the folder of a sharded checkpoint holds, without reading its shards and without running anything of it."""

import math
import os
from collections.abc import Iterable
from pathlib import Path

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from composer_checkpoint.inspection import FileDescription, TensorDescription
from composer_checkpoint.sharded._sources import LocalSource
from composer_checkpoint.sharded.reader import read_folder_metadata, read_manifest

__all__ = ["describe_folder"]


def describe_folder(folder: str | os.PathLike[str]) -> FileDescription:
    """Describe a folder that DCP wrote.

    Raises:
        NoCheckpointError: If there is no `.metadata` in it.
        CorruptCheckpointError: If it describes what cannot be, or files are missing or cut short.
        UnsafeCheckpointError: If `.metadata` asks for anything that a checkpoint does not need.
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
        "sharded", size_bytes, _keys(paths.values()), tensors, read_manifest(LocalSource(Path(folder)))
    )


def _keys(paths: Iterable[tuple[object, ...]]) -> tuple[str, ...]:
    """Return the top-level keys, and those below `state`, each once."""
    paths = list(paths)
    below = [f"state/{path[1]}" for path in paths if path[0] == "state" and len(path) > 1]
    return tuple(dict.fromkeys([*(str(path[0]) for path in paths), *below]))
