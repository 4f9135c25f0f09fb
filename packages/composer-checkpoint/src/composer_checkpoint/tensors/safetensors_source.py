"""Reading `.safetensors` files tensor by tensor: one alone, or several with an index."""

import os
from collections import OrderedDict
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch

from composer_checkpoint._file_reader import FileReader
from composer_checkpoint._safetensors_header import TensorSlot
from composer_checkpoint.errors import CorruptCheckpointError
from composer_checkpoint.manifest import Manifest
from composer_checkpoint.safetensors_file import read_safetensors
from composer_checkpoint.safetensors_index import read_index
from composer_checkpoint.tensors.pt_source import read_bytes
from composer_checkpoint.tensors.source import StoredTensor, TensorSource

__all__ = ["meant_of", "open_index_source", "open_safetensors_source"]


def open_safetensors_source(path: str) -> TensorSource:
    """Open one file.

    Raises:
        CorruptCheckpointError: If it is not whole.
    """
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
    """Open the files that an index names. What it names and no file has, is listed as missing.

    Raises:
        CorruptCheckpointError: If a file is missing or not whole, two have one tensor, or the index is none.
        UnsafeCheckpointError: If it names a file outside its own folder.
    """
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
    """Return the tensors of a file without those that the index has in another one.

    Args:
        index: Which names the files.
        shard: The file.
        found: What is in it, by name.
        earlier: The names in those before.
        weight_map: The file of each name that the index lists.

    Raises:
        CorruptCheckpointError: If two files have one tensor, and the index does not say which of them is meant.
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
    aliases: Mapping[str, str] = dict(manifest.info.get("aliases", ())) if manifest is not None else {}
    for alias, name in aliases.items():
        if name not in tensors:
            raise CorruptCheckpointError(
                f"{alias!r:.200} is another name of {name!r:.200}, and the file lacks that. Load another checkpoint."
            )
        tensors[alias] = tensors[name]
    return tensors, manifest


def _stored(reader: FileReader, name: str, slot: TensorSlot) -> StoredTensor:
    dtype = getattr(torch, slot.dtype)

    def fetch() -> torch.Tensor:
        return read_bytes(reader, slot.offset, slot.size_bytes).view(dtype).reshape(slot.shape)

    def fetch_range(start: int, count: int) -> torch.Tensor:
        size = dtype.itemsize
        return read_bytes(reader, slot.offset + start * size, count * size).view(dtype)

    return StoredTensor(dtype, slot.shape, fetch, (reader.path, name), fetch_range)
