"""Writing of `.safetensors` files with at most one tensor in memory."""

import os
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from composer_checkpoint.errors import CorruptCheckpointError
from composer_checkpoint.file_io import HASH_NAME, NUM_DIGITS, FileReader, FlushedFile, new_hasher, tensor_bytes
from composer_checkpoint.files import INDEX_SUFFIX, index_text, read_index
from composer_checkpoint.formats._unsupported import refuse_unfit
from composer_checkpoint.formats.pt_tensors import read_bytes
from composer_checkpoint.formats.safetensors import TensorSlot, header_of, read_safetensors
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
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # largest items first, so all are aligned
    # The header comes first in the file and holds the hashes, so a placeholder of equal length reserves its place.
    described = {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta") for name in names}
    notes: dict[str, Any] = {"torch_version": str(torch.__version__), **(info or {})}
    if aliases:
        notes["aliases"] = dict(aliases)
    placeholder, _ = header_of(described, dict.fromkeys(names, "0" * NUM_DIGITS[hash_name]), notes, hash_name)
    hashes: dict[str, str] = {}
    with open(path, "wb", buffering=0) as file:
        disk = FlushedFile(file)
        disk.write(memoryview(placeholder))
        for name in names:
            hasher = new_hasher(hash_name)
            disk.write(tensor_bytes(tensors[name].read()), hasher)
            hashes[name] = hasher.hexdigest()
            if progress is not None:
                progress(tensors[name].size_bytes)
        header, manifest = header_of(described, hashes, notes, hash_name)
        disk.rewrite(memoryview(header), 0)
        disk.finish()
    return manifest


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
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes!r} must be 1 or more, such as 5_000_000_000.")
    groups = list(_groups(tensors, max_shard_bytes))
    if len(groups) == 1:
        return {f"{name}.safetensors": groups[0]}
    return {f"{name}-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


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
    # Written last: an index names only files that are complete.
    if len(manifests) > 1:
        Path(folder, name + INDEX_SUFFIX).write_text(index_text(manifests))


def _groups(tensors: Mapping[str, StoredTensor], max_shard_bytes: int) -> Iterator[dict[str, StoredTensor]]:
    group: dict[str, StoredTensor] = {}
    size_bytes = 0
    for name, tensor in tensors.items():
        if group and size_bytes + tensor.size_bytes > max_shard_bytes:
            yield group
            group, size_bytes = {}, 0
        group[name] = tensor
        size_bytes += tensor.size_bytes
    yield group


def open_safetensors_source(path: str) -> TensorSource:
    """Open one `.safetensors` file.

    Raises:
        CorruptCheckpointError: If the file is not whole.
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
    """Open the files of an index. Tensors that the index lists and no file has are reported as missing.

    Raises:
        CorruptCheckpointError: If a file is missing or damaged, two have the same tensor, or the index is invalid.
        UnsafeCheckpointError: If the index names a file outside its own folder.
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

    Raises:
        CorruptCheckpointError: If two files have the same tensor and the index does not assign it to either.
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
