"""Writing of `.safetensors` files with at most one tensor in memory."""

import os
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import torch

from composer_checkpoint.errors import CorruptCheckpointError
from composer_checkpoint.file_io import HASH_NAME, FileReader
from composer_checkpoint.files import plan_files, read_index, write_index
from composer_checkpoint.formats._unsupported import refuse_unfit
from composer_checkpoint.formats.pt_tensors import read_bytes
from composer_checkpoint.formats.safetensors import TensorSlot, aliases_in, read_safetensors, write_safetensors
from composer_checkpoint.formats.tensor_source import StoredTensor, TensorSource
from composer_checkpoint.manifest import Manifest

__all__ = [
    "meant_of",
    "open_index_source",
    "open_safetensors_source",
    "plan_shards",
    "stream_safetensors",
    "stream_shards",
]

Progress = Callable[[int], object]


def stream_safetensors(
    tensors: Mapping[str, StoredTensor],
    path: str | os.PathLike[str],
    *,
    info: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
    hash_name: str = HASH_NAME,
    progress: Progress | None = None,
) -> Manifest:
    """Write tensors to one file, reading each only when it is written, and flush the file to the disk.

    The file equals that of `save_file`, manifest included. It is written in place, as by `save_file`.

    Args:
        tensors: Tensors by name.
        path: Path of the file.
        info: Further entries of the manifest.
        aliases: Further names of tensors, which `load_file` returns as well.
        hash_name: As for `save_file`.
        progress: Called with the number of bytes after each tensor.

    Returns:
        The manifest.

    Raises:
        IncompatibleCheckpointError: If a tensor is sparse or quantized, or its name does not fit the format.
        TypeError: If safetensors has no form for a dtype.

    Example:
        >>> import tempfile
        >>> from composer_checkpoint import load_file
        >>> from composer_checkpoint.tensors import as_stored
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> manifest = stream_safetensors({"w": as_stored(torch.ones(2))}, path)
        >>> load_file(path)["w"]
        tensor([1., 1.])
    """
    refuse_unfit(tensors, "safetensors", path, aliases=aliases or ())
    notes: dict[str, Any] = {"torch_version": str(torch.__version__), **(info or {})}
    if aliases:
        notes["aliases"] = dict(aliases)
    return write_safetensors(tensors, path, notes, hash_name, StoredTensor.read, progress)


def plan_shards(
    tensors: Mapping[str, StoredTensor], max_shard_bytes: int, name: str = "model"
) -> dict[str, dict[str, StoredTensor]]:
    """Assign tensors to files in order, as many as fit in each. A tensor larger than a file gets one of its own.

    Raises:
        ValueError: If `max_shard_bytes` is less than 1.

    Example:
        >>> from composer_checkpoint.tensors import as_stored
        >>> plan_shards({"a": as_stored(torch.ones(4)), "b": as_stored(torch.ones(4))}, 16).keys()
        dict_keys(['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'])
    """
    return plan_files((({key: tensor}, tensor.size_bytes) for key, tensor in tensors.items()), max_shard_bytes, name)


def stream_shards(
    shards: Mapping[str, Mapping[str, StoredTensor]],
    folder: str | os.PathLike[str],
    *,
    name: str = "model",
    info: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the planned files, and their index if there are several, to an existing folder.

    Args:
        shards: Result of `plan_shards`.
        folder: Path of the folder; see `write_atomically(folder=True)`.
        name: Prefix of the index's name.
        info: Further entries of the manifests.
        aliases: Further names of tensors, which `load_file` returns as well.
        progress: Called with the number of bytes after each tensor.
    """
    manifests = {
        shard: stream_safetensors(
            tensors,
            Path(folder, shard),
            info=info,
            aliases={alias: kept for alias, kept in (aliases or {}).items() if kept in tensors},
            progress=progress,
        )
        for shard, tensors in shards.items()
    }
    write_index(manifests, Path(folder), name)


def open_safetensors_source(path: str) -> TensorSource:
    """Open one `.safetensors` file."""
    reader = FileReader(path)
    try:
        tensors, manifest = _tensors_of(reader)
    except BaseException:
        reader.close()
        raise
    info = {} if manifest is None else manifest.info
    tree: Any = {"state": {"model": OrderedDict(tensors)}} if info.get("layout") == "composer" else tensors
    source = TensorSource("safetensors", tree, reader.size_bytes, manifest)
    source.on_close(reader)
    return source


def open_index_source(path: str) -> TensorSource:
    """Open the files of an index. Tensors that the index lists and no file has are reported as missing."""
    index = read_index(path)
    weight_map = {name: shard for shard, names in index.shards.items() for name in names}
    source = TensorSource("safetensors", {}, 0, index.manifest)
    tensors: dict[str, StoredTensor] = {}
    files: dict[str, int] = {}
    try:
        for shard, names in index.shards.items():
            file = Path(path).parent / shard
            if not file.exists():
                raise CorruptCheckpointError(
                    f"{file.parent} lacks the shard {shard}, in which {index.path.name} has {len(names)} tensors. "
                    f"Bring the file back, or use another checkpoint."
                )
            reader = FileReader(file)
            source.on_close(reader)
            found, _ = _tensors_of(reader)
            files[shard] = reader.size_bytes
            tensors |= meant_of(path, shard, found, tensors, weight_map)
    # Also on KeyboardInterrupt: no one else would close the files opened so far.
    except BaseException:
        source.close()
        raise
    source.tree, source.tensors = tensors, tensors
    source.size_bytes, source.files = sum(files.values()), files
    source.missing = tuple(sorted(weight_map.keys() - tensors.keys()))
    return source


def meant_of(
    index: str | os.PathLike[str],
    shard: str,
    found: Mapping[str, StoredTensor],
    earlier: Container[str],
    weight_map: Mapping[str, str],
) -> dict[str, StoredTensor]:
    """Return the tensors of a file without those that the index assigns to another file.

    Args:
        index: Path of the index.
        shard: Name of the file.
        found: Tensors in the file, by name.
        earlier: Names of tensors in the files before.
        weight_map: File of each tensor that the index lists.
    """
    for name in found:
        if name in earlier and name not in weight_map:
            raise CorruptCheckpointError(
                f"{os.fspath(index)} names {shard}, which has a tensor {name!r:.200} that a file before it has, too, "
                f"and does not say which of them is meant. Add it to the weight_map, or use another checkpoint."
            )
    return {name: tensor for name, tensor in found.items() if weight_map.get(name, shard) == shard}


def _tensors_of(reader: FileReader) -> tuple[dict[str, StoredTensor], Manifest | None]:
    header, manifest = read_safetensors(reader)
    tensors = {name: _stored(reader, name, slot) for name, slot in header.tensors.items()}
    tensors |= {alias: tensors[name] for alias, name in aliases_in(manifest, tensors).items()}
    return tensors, manifest


def _stored(reader: FileReader, name: str, slot: TensorSlot) -> StoredTensor:
    dtype = getattr(torch, slot.dtype)

    def fetch() -> torch.Tensor:
        return read_bytes(reader, slot.offset, slot.size_bytes).view(dtype).reshape(slot.shape)

    def fetch_range(start: int, count: int) -> torch.Tensor:
        size = dtype.itemsize
        return read_bytes(reader, slot.offset + start * size, count * size).view(dtype)

    return StoredTensor(dtype, slot.shape, fetch, (reader.path, name), fetch_range)
