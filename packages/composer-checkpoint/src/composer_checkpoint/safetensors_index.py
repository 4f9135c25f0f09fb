"""Weights in several `.safetensors` files, and the index that says which tensor is in which, as Hugging Face has it."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from composer_checkpoint._file_reader import FileReader
from composer_checkpoint._formats import INDEX_SUFFIX, plain_file
from composer_checkpoint._strict_json import parse_json
from composer_checkpoint.commit import write_atomically
from composer_checkpoint.errors import CorruptCheckpointError, NoCheckpointError, UnsafeCheckpointError
from composer_checkpoint.files import load_open_weights, save_file
from composer_checkpoint.hashing import HASH_NAME
from composer_checkpoint.manifest import Manifest, TensorEntry
from composer_checkpoint.safetensors_file import by_text_names, read_safetensors, verify_safetensors
from composer_checkpoint.validation import validate_file

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["INDEX_SUFFIX", "ShardIndex", "load_shards", "read_index", "save_weights_in_shards", "verify_shards"]

_SUFFIX = ".safetensors"
_MANIFEST_KEY = "composer_manifest"
_MAX_INDEX_BYTES = 1 << 29
_MAX_NAMES = 10


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """What an index says: its own path, which tensors are in which file, and what we noted when we wrote it."""

    path: Path
    shards: Mapping[str, frozenset[str]]
    manifest: Manifest | None


def save_weights_in_shards(
    weights: "Mapping[str, Tensor]",
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int,
    name: str = "model",
    info: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    hash_name: str = HASH_NAME,
) -> Path:
    """Write weights to `.safetensors` files of a limited size, and an index, to a folder that appears whole.

    Whoever reads Hugging Face's files reads these. Weights that fit into one file become `model.safetensors`, without
    an index. Names of one and the same tensor share a file, which has it once.

    Args:
        weights: Tensors by name.
        folder: Where to. It must not exist, or is replaced.
        max_shard_bytes: How large the tensors of one file may be together. A larger tensor gets a file of its own.
        name: What the files' names begin with.
        info: What the manifests should say, as for `save_file`.
        overwrite: Whether a folder of this name may be replaced.
        hash_name: As for `save_file`.

    Returns:
        The index, or the only file: what `load_file` takes.

    Raises:
        CheckpointConflictError: If there is something of this name, and `overwrite` is false.
        StorageError: If the disk fails.
        TypeError: If anything is no tensor that safetensors has a form for.
        ValueError: If `max_shard_bytes` is less than 1.

    Example:
        >>> import tempfile, torch
        >>> from composer_checkpoint import load_file
        >>> path = save_weights_in_shards(
        ...     {"a": torch.ones(4), "b": torch.zeros(4)}, tempfile.mkdtemp() + "/model", max_shard_bytes=16
        ... )
        >>> sorted(os.listdir(path.parent))
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors', 'model.safetensors.index.json']
        >>> load_file(path)["a"]
        tensor([1., 1., 1., 1.])
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes!r} is no size. Give 1 or more, such as 5_000_000_000.")
    groups = list(_groups(by_text_names(weights), max_shard_bytes))
    names = [f"{name}-{number:05d}-of-{len(groups):05d}{_SUFFIX}" for number in range(1, len(groups) + 1)]
    if len(groups) == 1:
        names = [name + _SUFFIX]
    with write_atomically(folder, overwrite=overwrite, folder=True) as unfinished:
        manifests = {
            shard: save_file(dict(group), unfinished / shard, info=info, hash_name=hash_name)
            for shard, group in zip(names, groups, strict=True)
        }
        if len(groups) > 1:
            (unfinished / (name + INDEX_SUFFIX)).write_text(index_text(manifests))
    return Path(folder) / (name + INDEX_SUFFIX if len(groups) > 1 else names[0])


def read_index(path: str | os.PathLike[str]) -> ShardIndex:
    """Read an index; the files that it names are not looked at.

    Raises:
        NoCheckpointError: If there is no such index.
        CorruptCheckpointError: If it is no index, or has a tensor twice.
        UnsafeCheckpointError: If it names a file outside its own folder.
    """
    index = Path(path)
    try:
        with FileReader(os.fspath(path)) as reader:
            if reader.size_bytes > _MAX_INDEX_BYTES:
                _refuse(index, f"it has {reader.size_bytes} bytes, more than the {_MAX_INDEX_BYTES} of any index")
            data = reader.read(0, reader.size_bytes)
    except FileNotFoundError as error:
        raise NoCheckpointError(f"there is no index at {os.fspath(path)!r}. Check the path.") from error
    try:
        raw: Any = parse_json(data.decode())
    except (ValueError, RecursionError) as error:
        _refuse(index, f"it is not JSON: {error!s:.200}")
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        _refuse(index, "it has no weight_map from tensors to files")
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        _check_name(index, tensor, shard)
        shards.setdefault(shard, set()).add(tensor)
    return ShardIndex(index, {shard: frozenset(names) for shard, names in shards.items()}, _manifest_of(raw))


def load_shards(path: str | os.PathLike[str], **options: Any) -> "dict[str, Tensor]":
    """Load all files that an index names, after comparing their headers with it. `options` are those of `load_file`.

    Raises:
        CheckpointError: If the index or a file cannot be trusted to be what was written, with the file's name.
    """
    index = read_index(path)
    weights: dict[str, Any] = {}
    for shard in _checked_shards(index):
        validate_file(index.path.parent / shard)
        with _opened(index, shard) as reader:
            loaded = load_open_weights(reader, reader.path, **options)
        _refuse_in_two_shards(index, shard, loaded)  # of names that tensors have besides their own
        weights.update(loaded)
    return weights


def verify_shards(path: str | os.PathLike[str]) -> Manifest | None:
    """Compare every byte of the files that an index names with their hashes.

    Returns:
        The manifest, or `None` for files of other programs.

    Raises:
        CorruptCheckpointError: If anything differs; the message names the file and the tensor.
    """
    index = read_index(path)
    for shard in _checked_shards(index):
        with _opened(index, shard) as reader:
            verify_safetensors(reader)
    return index.manifest


def _groups(weights: "Mapping[str, Tensor]", max_shard_bytes: int) -> "Iterator[dict[str, Tensor]]":
    """Yield the weights of each file. Names of one tensor stay together."""
    tied: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, tensor in weights.items():
        if not hasattr(tensor, "data_ptr"):
            raise TypeError(f"{name} is a {type(tensor).__name__}, and safetensors holds tensors only.")
        own = (name,) if not tensor.numel() else (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        tied.setdefault((*own, tensor.dtype, tensor.is_conj(), tensor.is_neg()), {})[name] = tensor
    group: dict[str, Any] = {}
    size_bytes = 0
    for same in tied.values():
        own_bytes = next(iter(same.values())).nbytes
        if group and size_bytes + own_bytes > max_shard_bytes:
            yield group
            group, size_bytes = {}, 0
        group |= same
        size_bytes += own_bytes
    yield group


def index_text(manifests: Mapping[str, Manifest]) -> str:
    """Return the content of the index of several files."""
    tensors: dict[str, TensorEntry] = {}
    for manifest in manifests.values():
        tensors |= manifest.tensors
    first = next(iter(manifests.values()))
    whole = Manifest(hash_name=first.hash_name, tensors=tensors, info=first.info)
    total = sum(entry.size_bytes for entry in tensors.values())
    weight_map = {name: shard for shard, manifest in manifests.items() for name in manifest.tensors}
    metadata = {"total_size": total, _MANIFEST_KEY: whole.to_json()}
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=2)


def _manifest_of(raw: Mapping[str, Any]) -> Manifest | None:
    metadata = raw.get("metadata")
    text = metadata.get(_MANIFEST_KEY) if isinstance(metadata, dict) else None
    return Manifest.from_json(text) if isinstance(text, str) else None


def _check_name(index: Path, tensor: str, shard: object) -> None:
    if not isinstance(shard, str) or not shard.endswith(_SUFFIX):
        _refuse(index, f"it says that {tensor!r:.200} is in {shard!r:.200}, which is no {_SUFFIX} file")
    if "/" in shard or "\\" in shard or "\0" in shard or shard == _SUFFIX:
        raise UnsafeCheckpointError(
            f"{index} says that {tensor!r:.200} is in {shard!r:.200}, which is outside its folder; nothing was read. "
            f"Do not use this checkpoint."
        )


def _checked_shards(index: ShardIndex) -> Iterable[str]:
    """Return the files that an index names, after comparing the headers of all of them with it."""
    for shard, listed in index.shards.items():
        if not (index.path.parent / shard).exists():
            raise CorruptCheckpointError(
                f"{index.path.parent} lacks the shard {shard}, in which {index.path.name} has {len(listed)} tensors "
                f"({_some(listed)}). Bring the file back, or load another checkpoint."
            )
        with _opened(index, shard):
            pass
    return index.shards


@contextmanager
def _opened(index: ShardIndex, shard: str) -> Iterator[FileReader]:
    """Open a file and compare its header with the index, so that neither can say what the other does not.

    That is done each time, since another file may get this name meanwhile.
    """
    with plain_file(os.fspath(index.path.parent / shard)) as path, FileReader(path) as reader:
        header, manifest = read_safetensors(reader)
        listed = index.shards[shard]
        _refuse_in_two_shards(index, shard, header.tensors)
        if listed != header.tensors.keys():
            _refuse(
                index.path,
                f"{shard} holds other tensors than it says: {_some(listed ^ header.tensors.keys())} is in one of them "
                f"only",
            )
        _compare_manifests(index, shard, manifest)
        yield reader


def _refuse_in_two_shards(index: ShardIndex, shard: str, names: Iterable[str]) -> None:
    for name in set(names) - index.shards[shard]:
        if others := [other for other, listed in index.shards.items() if name in listed]:
            _refuse(index.path, f"the tensor {name!r:.200} is in two shards, {others[0]} and {shard}")


def _compare_manifests(index: ShardIndex, shard: str, own: Manifest | None) -> None:
    """Refuse files of two saves in one folder."""
    if index.manifest is None:
        return
    listed = {name: index.manifest.tensors.get(name) for name in index.shards[shard]}
    if own is None or dict(own.tensors) != listed:
        raise CorruptCheckpointError(
            f"{index.path.parent / shard} is not what was written together with {index.path.name}: the hashes of its "
            f"tensors are others. It is of another save. Load another checkpoint."
        )


def _some(names: frozenset[str] | set[str]) -> str:
    more = ", ..." if len(names) > _MAX_NAMES else ""
    return ", ".join(sorted(names)[:_MAX_NAMES]) + more


def _refuse(index: Path, what: str) -> NoReturn:
    raise CorruptCheckpointError(f"{index} is not a whole index of safetensors files: {what}. Load another checkpoint.")
