"""Tensor-by-tensor reader and writer of `.safetensors` files, with at most one tensor in memory."""

import os
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from contextlib import ExitStack
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
    "merge_files",
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
        TypeError: If safetensors does not support a dtype.

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
    with ExitStack() as opened:
        reader = opened.enter_context(FileReader(path))
        header, manifest = read_safetensors(reader)
        tensors = {name: _stored(reader, name, slot) for name, slot in header.tensors.items()}
        tensors |= {alias: tensors[name] for alias, name in aliases_in(manifest, tensors).items()}
        info = {} if manifest is None else manifest.info
        tree: Any = {"state": {"model": OrderedDict(tensors)}} if info.get("layout") == "composer" else tensors
        source = TensorSource("safetensors", tree, reader.size_bytes, manifest)
        source.on_close(opened.pop_all())
    return source


def open_index_source(path: str) -> TensorSource:
    """Open the files of an index. Tensors that the index lists and no file has are reported as missing."""
    index = read_index(path)
    listed = {name: shard for shard, names in index.shards.items() for name in names}
    source = merge_files(index.path, listed, open_safetensors_source)
    source.manifest = index.manifest
    return source


def merge_files(index: Path, listed: Mapping[str, str], open_file: Callable[[str], TensorSource]) -> TensorSource:
    """Open the files of an index as one source. Tensors that the index lists and no file has are reported as missing.

    Args:
        index: Path of the index.
        listed: File of each tensor that the index lists.
        open_file: Function that opens a file.
    """
    tensors: dict[str, StoredTensor] = {}
    files: dict[str, int] = {}
    with ExitStack() as opened:
        for shard in dict.fromkeys(listed.values()):
            path = index.parent / shard
            if not path.exists():
                raise CorruptCheckpointError(
                    f"{index.parent} lacks the shard {shard}, in which {index.name} has "
                    f"{list(listed.values()).count(shard)} tensors. Bring the file back, or use another checkpoint."
                )
            source = opened.enter_context(open_file(os.fspath(path)))
            tensors |= _meant(index, source.tensors, tensors, shard, listed)
            files[shard] = source.size_bytes
        missing = tuple(sorted(listed.keys() - tensors.keys()))
        whole = TensorSource("safetensors", tensors, sum(files.values()), missing=missing, files=files)
        whole.on_close(opened.pop_all())
    return whole


def _meant(
    index: Path, found: Mapping[str, StoredTensor], earlier: Container[str], shard: str, listed: Mapping[str, str]
) -> dict[str, StoredTensor]:
    """Return the tensors of a file, except those that the index assigns to another file."""
    for name in found:
        if name in earlier and name not in listed:
            raise CorruptCheckpointError(
                f"{index} names {shard}, which has a tensor {name!r:.200} that a file before it has, too, and does not "
                f"say which of them is meant. Add it to the weight_map, or use another checkpoint."
            )
    return {name: tensor for name, tensor in found.items() if listed.get(name, shard) == shard}


def _stored(reader: FileReader, name: str, slot: TensorSlot) -> StoredTensor:
    dtype = getattr(torch, slot.dtype)

    def fetch() -> torch.Tensor:
        return read_bytes(reader, slot.offset, slot.size_bytes).view(dtype).reshape(slot.shape)

    def fetch_range(start: int, count: int) -> torch.Tensor:
        size = dtype.itemsize
        return read_bytes(reader, slot.offset + start * size, count * size).view(dtype)

    return StoredTensor(dtype, slot.shape, fetch, (reader.path, name), fetch_range)
