"""`.safetensors` files and their indices: weights only, readable by all tools, with a manifest in the header."""

import json
import math
import os
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar

import torch
from blake3 import blake3

from composer_checkpoint import file_io
from composer_checkpoint._tree import doubled, path_text
from composer_checkpoint.errors import (
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UnsafeCheckpointError,
    first_few,
)
from composer_checkpoint.formats._zip import Readable
from composer_checkpoint.formats.archives import INDEX_SUFFIX, plain_file
from composer_checkpoint.formats.tensor_source import (
    StoredTensor,
    TensorSource,
    as_stored,
    in_file,
    refuse_quantized,
    refuse_sparse,
)
from composer_checkpoint.manifest import Manifest, TensorEntry, parse_json

LENGTH = struct.Struct("<Q")
METADATA_KEY = "__metadata__"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

_MAX_DIMS = 64  # torch's own limit

# Name of each dtype in torch, and bytes per element.
DTYPES: Mapping[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "C64": ("complex64", 8),
}


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor, and the location of its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Tensors by name, metadata strings by key, and the header's bytes in the file."""

    tensors: dict[str, TensorSlot]
    metadata: dict[str, str]
    raw: bytes


def read_header(file: Readable) -> Header:
    """Read a header and compare it with the size of the file."""
    if file.size_bytes < LENGTH.size:
        raise _error(f"it has {file.size_bytes} bytes, fewer than the length of a header")
    # Checked before it is read, so that a damaged length cannot allocate gigabytes.
    (length,) = LENGTH.unpack(file.read(0, LENGTH.size))
    if length > min(MAX_HEADER_BYTES, file.size_bytes - LENGTH.size):
        raise _error(f"its header would have {length} bytes; the file has {file.size_bytes}")
    raw = file.read(LENGTH.size, length)
    try:
        parsed: Any = parse_json(raw.decode())
    except (ValueError, RecursionError) as error:
        raise _error(f"its header is not JSON: {error!s:.200}") from error
    if not isinstance(parsed, dict):
        raise _error("its header is not an object")
    metadata = parsed.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _error("its metadata is not texts by name")
    start = LENGTH.size + length
    tensors = {name: _slot(name, value, start) for name, value in parsed.items()}
    position = start
    # The format forbids gaps and overlaps. Empty tensors sort before the one that starts at the same byte.
    for name, slot in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size_bytes)):
        if slot.offset != position:
            raise _error(f"its tensor {name!r:.200} starts at byte {slot.offset}, where {position} was expected")
        position += slot.size_bytes
    if position != file.size_bytes:
        raise _error(f"its tensors end at byte {position}, and the file has {file.size_bytes}")
    return Header(tensors, metadata, raw)


def _slot(name: str, value: Any, start: int) -> TensorSlot:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if dtype in DTYPES:
            torch_dtype, item_bytes = DTYPES[dtype]
        case _:
            torch_dtype, item_bytes, shape, begin, end = "", 0, [], 0, -1  # refused below
    is_shape = len(shape) <= _MAX_DIMS and all(type(size) is int and 0 <= size < 1 << 63 for size in shape)
    if not is_shape or not 0 <= begin <= end or math.prod(shape) * item_bytes != end - begin:
        raise _error(f"its tensor {name!r:.200} is {value!r:.200}, whose dtype, shape and bytes do not fit")
    return TensorSlot(torch_dtype, tuple(shape), start + begin, end - begin)


def _error(what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"the file is not a whole safetensors file: {what}. Load another checkpoint.")


log = getLogger(__name__)

T = TypeVar("T")

_Item = TypeVar("_Item")

Progress = Callable[[int], object]

_MANIFEST_KEY = "composer_manifest"
_SEAL_KEY = "composer_seal"
_NO_SEAL = "0" * 64
_SEAL = re.compile(rb'"composer_seal":"([0-9a-f]{64})"')
FORMAT_NAMES = {torch_name: name for name, (torch_name, _) in DTYPES.items()}


def save_safetensors(obj: Any, path: str, info: Mapping[str, Any], hash_name: str) -> Manifest:
    """Write the weights of a state, or a flat dict of tensors, and flush the file to the disk."""
    is_state = isinstance(obj, Mapping) and isinstance(obj.get("state"), Mapping) and "model" in obj["state"]
    weights = obj["state"]["model"] if is_state else obj
    if not isinstance(weights, Mapping) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise TypeError(
            f"a .safetensors file holds weights only, as a dict of tensors or as {{'state': {{'model': ...}}}}; got "
            f"{type(weights).__name__}. Save as .pt what else there is."
        )
    if is_state and (left_out := [*(name for name in obj["state"] if name != "model"), *(set(obj) - {"state"})]):
        log.info("A .safetensors file holds weights only; left out were %s.", ", ".join(map(str, left_out)))
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for same in tied_weights(by_text_names(weights)):
        first, *others = same
        tensor = tensors[first] = same[first]
        aliases |= dict.fromkeys(others, first)
        if tensor.layout != torch.strided:
            raise TypeError(f"{first} is {tensor.dtype} of layout {tensor.layout}, which safetensors has no form for.")
    stored = {name: as_stored(tensor) for name, tensor in tensors.items()}
    check_fit(stored, aliases)
    notes = {**info, **({"aliases": aliases} if aliases else {}), **({"layout": "composer"} if is_state else {})}
    return _write(stored, path, notes, hash_name)


def tied_weights(weights: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Group the names of each tensor, in the order of their first names."""
    tied: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, and safetensors holds tensors only.")
        own: tuple[Any, ...] = (name,)
        # Sparse tensors have no address, and empty ones may all have the address 0.
        if tensor.layout == torch.strided and tensor.numel():
            own = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        # A conjugated view shares its memory with the plain tensor.
        tied.setdefault((*own, tensor.dtype, tensor.is_conj(), tensor.is_neg()), {})[name] = tensor
    return tied.values()


def _write(
    tensors: Mapping[str, StoredTensor],
    path: str | os.PathLike[str],
    info: Mapping[str, Any],
    hash_name: str,
    progress: Progress | None = None,
) -> Manifest:
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # largest items first, so all are aligned
    tensors = {name: tensors[name] for name in names}
    hashes = dict.fromkeys(names, "0" * file_io.NUM_DIGITS[hash_name])
    with open(path, "wb", buffering=0) as file:
        disk = file_io.FlushedFile(file)
        # The header comes first in the file and holds the hashes, so a placeholder of equal length reserves its place.
        disk.write(memoryview(_header_of(tensors, hashes, info, hash_name)[0]))
        for name, tensor in tensors.items():
            hasher, data = file_io.new_hasher(hash_name), file_io.tensor_bytes(tensor.read())
            disk.write(data, hasher)
            hashes[name] = hasher.hexdigest()
            if progress is not None:
                progress(data.nbytes)
        header, manifest = _header_of(tensors, hashes, info, hash_name)
        disk.rewrite(memoryview(header), 0)
        disk.finish()
    return manifest


def load_safetensors(
    reader: file_io.FileReader, *, map_location: Any, verify: bool
) -> tuple[Any, Manifest | None, Collection[str]]:
    """Check and load a safetensors file.

    Returns the weights as they were saved, the manifest if any, and the weights known to be finite.
    """
    from safetensors.torch import load_file  # here, since it imports NumPy and not all users need the format

    header, manifest = read_safetensors(reader)
    finite: Collection[str] = ()
    if verify:
        # Mapped, as load_file() maps the file as well.
        finite = _verify_payload(reader, header, manifest, file_io.MappedFile(reader))
    device = map_location if isinstance(map_location, str | int) else str(map_location or "cpu")
    tensors: dict[str, Any] = load_file(reader.own_path, device=device)
    # In the order of the header, which the library does not promise to keep.
    tensors = {name: tensors[name] for name in header.tensors}
    tensors |= {alias: tensors[name] for alias, name in aliases_in(manifest, tensors).items()}
    if manifest is None or manifest.info.get("layout") != "composer":
        return tensors, manifest, finite
    return {"state": {"model": OrderedDict(tensors)}}, manifest, {f"state/model/{name}" for name in finite}


def aliases_in(manifest: Manifest | None, names: Collection[str]) -> dict[str, str]:
    """Return the further names of tensors, with the name under which the file has each."""
    aliases: dict[str, str] = {} if manifest is None else dict(manifest.info.get("aliases", ()))
    for alias, name in aliases.items():
        if name not in names:
            raise CorruptCheckpointError(
                f"{alias!r:.200} is another name of {name!r:.200}, and the file lacks that. Load another checkpoint."
            )
    return aliases


def verify_safetensors(reader: file_io.FileReader) -> Manifest | None:
    """Compare every byte with its hash; return the manifest, or `None` if the file has none."""
    header, manifest = read_safetensors(reader)
    _verify_payload(reader, header, manifest)
    return manifest


def read_safetensors(reader: file_io.FileReader) -> tuple[Header, Manifest | None]:
    """Read and check the header."""
    header = read_header(reader)
    # Files of other tools have neither mark. A file with only one has been changed.
    marks = [key for key in (_MANIFEST_KEY, _SEAL_KEY) if key in header.metadata]
    if not marks:
        return header, None
    match = _SEAL.search(header.raw)
    if len(marks) < 2 or match is None:
        raise CorruptCheckpointError(
            f"the file was written with a manifest and a seal, and has only {marks}. Load another checkpoint."
        )
    # The seal is the hash of the header with zeros in place of the seal.
    unsealed = header.raw[: match.start(1)] + _NO_SEAL.encode() + header.raw[match.end(1) :]
    if blake3(unsealed).hexdigest() != match[1].decode():
        raise CorruptCheckpointError(
            "the file's header (names, dtypes, shapes or hashes) is not what was written. Load another checkpoint."
        )
    manifest = Manifest.from_json(header.metadata[_MANIFEST_KEY])
    if manifest.tensors.keys() != header.tensors.keys():
        raise CorruptCheckpointError("the manifest lists other tensors than the file has. Load another checkpoint.")
    return header, manifest


def by_text_names(weights: Mapping[Any, T]) -> dict[str, T]:
    """Return weights by their keys as strings, since names in a file are strings."""
    keys: dict[str, Any] = {}
    for key in weights:
        if keys.setdefault(str(key), key) is not key:
            raise doubled(path_text([keys[str(key)]]), path_text([key]), str(key), "a .safetensors file")
    return {name: weights[key] for name, key in keys.items()}


def check_fit(tensors: Mapping[str, StoredTensor], aliases: Iterable[str] = (), called: str = "safetensors") -> None:
    """Raise if the format has no form for a tensor or a name, before anything is written."""
    refuse_quantized(tensors, called)
    refuse_sparse(tensors, called)
    for name, tensor in tensors.items():
        if str(tensor.dtype).removeprefix("torch.") not in FORMAT_NAMES:
            raise TypeError(
                f"{name} is {tensor.dtype}, which safetensors has no form for. Write a .pt file, or leave it out."
            )
    for name in (*tensors, *aliases):
        if name == METADATA_KEY:
            raise IncompatibleCheckpointError(
                f"a tensor is called {METADATA_KEY!r}, which the .safetensors format reserves for its metadata. Give "
                f"it another name, or write a .pt file."
            )
        if not name.isascii() and name.encode(errors="replace").decode() != name:  # its own reader cannot decode it
            raise IncompatibleCheckpointError(
                f"a tensor is called {name!r:.200}, which is no text of Unicode, as the names in a .safetensors file "
                f"are. Give it another name, or write a .pt file."
            )


def _header_of(
    tensors: Mapping[str, StoredTensor], hashes: Mapping[str, str], info: Mapping[str, Any], hash_name: str
) -> tuple[bytes, Manifest]:
    """Return the file's bytes before the tensors, whose length does not depend on the hashes, and the manifest."""
    slots: dict[str, Any] = {}
    entries: dict[str, TensorEntry] = {}
    position = 0
    for name, tensor in tensors.items():
        dtype, end = str(tensor.dtype).removeprefix("torch."), position + tensor.size_bytes
        slots[name] = {"dtype": FORMAT_NAMES[dtype], "shape": tensor.shape, "data_offsets": (position, end)}
        entries[name] = TensorEntry(dtype, tensor.shape, tensor.size_bytes, hashes[name])
        position = end
    manifest = Manifest(hash_name=hash_name, tensors=entries, info=info)
    metadata = {"format": "pt", _MANIFEST_KEY: manifest.to_json(), _SEAL_KEY: _NO_SEAL}
    text = json.dumps({METADATA_KEY: metadata, **slots}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns tensors to 8 bytes
    # The first match is the seal: metadata precedes all tensors, and quotes inside the manifest are escaped.
    sealed = text.replace(
        f'"{_SEAL_KEY}":"{_NO_SEAL}"'.encode(), f'"{_SEAL_KEY}":"{blake3(text).hexdigest()}"'.encode(), 1
    )
    return LENGTH.pack(len(sealed)) + sealed, manifest


def _verify_payload(
    reader: file_io.FileReader, header: Header, manifest: Manifest | None, mapped: file_io.MappedFile | None = None
) -> Collection[str]:
    """Compare all tensors with their hashes; return the names of those that were seen to be finite."""
    if manifest is None:
        return ()
    return file_io.verify_ranges(
        reader,
        {name: (slot.offset, slot.size_bytes) for name, slot in header.tensors.items()},
        {name: entry.hash for name, entry in manifest.tensors.items()},
        manifest.hash_name,
        {name: (name, slot.dtype) for name, slot in header.tensors.items()},
        mapped,
    )


def stream_safetensors(
    tensors: Mapping[str, StoredTensor],
    path: str | os.PathLike[str],
    *,
    info: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
    hash_name: str = file_io.HASH_NAME,
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
    check_fit(tensors, aliases or ())
    notes: dict[str, Any] = {"torch_version": str(torch.__version__), **(info or {})}
    if aliases:
        notes["aliases"] = dict(aliases)
    return _write(tensors, path, notes, hash_name, progress)


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
        reader = opened.enter_context(file_io.FileReader(path))
        header, manifest = read_safetensors(reader)
        tensors = {
            name: in_file(reader, slot.offset, getattr(torch, slot.dtype), slot.shape, (reader.path, name))
            for name, slot in header.tensors.items()
        }
        tensors |= {alias: tensors[name] for alias, name in aliases_in(manifest, tensors).items()}
        info = {} if manifest is None else manifest.info
        tree: Any = {"state": {"model": OrderedDict(tensors)}} if info.get("layout") == "composer" else tensors
        return TensorSource("safetensors", tree, reader.size_bytes, manifest).on_close(opened.pop_all())


def plan_files(
    parts: Iterable[tuple[Mapping[str, _Item], int]], max_shard_bytes: int, name: str
) -> dict[str, dict[str, _Item]]:
    """Assign parts, which are tensors that stay together, to files in order, as many as fit in each.

    A part larger than `max_shard_bytes` gets a file of its own. Returns the content of each file by its name.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes!r} must be 1 or more, such as 5_000_000_000.")
    groups: list[dict[str, _Item]] = [{}]
    filled = 0
    for part, size_bytes in parts:
        if groups[-1] and filled + size_bytes > max_shard_bytes:
            groups.append({})
            filled = 0
        groups[-1].update(part)
        filled += size_bytes
    # Hugging Face's names, which include the number of files, so files are named after all parts are assigned.
    if len(groups) == 1:
        return {name + SUFFIX: groups[0]}
    return {f"{name}-{number:05d}-of-{len(groups):05d}{SUFFIX}": group for number, group in enumerate(groups, 1)}


SUFFIX = ".safetensors"
_MAX_INDEX_BYTES = 1 << 29  # an index is read into memory


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """Content of an index: its path, the names of the tensors in each file, and our manifest, if any."""

    path: Path
    shards: Mapping[str, frozenset[str]]
    manifest: Manifest | None


def read_index(path: str | os.PathLike[str], suffix: str = SUFFIX) -> ShardIndex:
    """Read an index, but not the files that it names, which must have a suffix and be in its own folder."""
    index = Path(path)
    with file_io.FileReader(index) as reader:
        if reader.size_bytes > _MAX_INDEX_BYTES:
            raise _index_error(index, f"it has {reader.size_bytes} bytes, more than {_MAX_INDEX_BYTES}")
        data = reader.read(0, reader.size_bytes)
    try:
        raw: Any = parse_json(data.decode())
    except (ValueError, RecursionError) as error:
        raise _index_error(index, f"it is not JSON: {error!s:.200}") from error
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _index_error(index, "it has no weight_map from tensors to files")
    shards = _shards_in(weight_map, index, suffix)
    metadata = raw.get("metadata")
    text = metadata.get(_MANIFEST_KEY) if isinstance(metadata, dict) else None
    manifest = Manifest.from_json(text) if isinstance(text, str) else None
    return ShardIndex(index, shards, manifest)


def _shards_in(weight_map: Mapping[str, Any], index: Path, suffix: str) -> dict[str, frozenset[str]]:
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(suffix):
            raise _index_error(index, f"it says that {tensor!r:.200} is in {shard!r:.200}, which is no {suffix} file")
        # A shard must be a plain file name.
        if "/" in shard or "\\" in shard or "\0" in shard or shard == suffix:
            raise UnsafeCheckpointError(
                f"{index} says that {tensor!r:.200} is in {shard!r:.200}, which is outside its folder; nothing was "
                f"read. Do not use this checkpoint."
            )
        shards.setdefault(shard, set()).add(tensor)
    return {shard: frozenset(names) for shard, names in shards.items()}


def write_index(manifests: Mapping[str, Manifest], folder: Path, name: str) -> None:
    """Write the index of files that are complete, if there are several."""
    if len(manifests) < 2:
        return
    tensors: dict[str, TensorEntry] = {}
    for manifest in manifests.values():
        tensors |= manifest.tensors
    first = next(iter(manifests.values()))
    whole = Manifest(hash_name=first.hash_name, tensors=tensors, info=first.info)
    total = sum(entry.size_bytes for entry in tensors.values())
    weight_map = {name: shard for shard, manifest in manifests.items() for name in manifest.tensors}
    metadata = {"total_size": total, _MANIFEST_KEY: whole.to_json()}
    text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
    (folder / (name + INDEX_SUFFIX)).write_text(text)


def checked_shards(index: ShardIndex) -> Iterable[str]:
    """Return the files of an index, after comparing the headers of all of them with it."""
    for shard, listed in index.shards.items():
        path_of_shard(index, shard, listed)
        with open_shard(index, shard):
            pass
    return index.shards


def path_of_shard(index: ShardIndex, shard: str, listed: Collection[str]) -> Path:
    """Return the path of a file of an index, which must exist."""
    path = index.path.parent / shard
    if not path.exists():
        raise CorruptCheckpointError(
            f"{index.path.parent} lacks the shard {shard}, in which {index.path.name} has {len(listed)} tensors "
            f"({first_few(sorted(listed))}). Bring the file back, or load another checkpoint."
        )
    return path


@contextmanager
def open_shard(index: ShardIndex, shard: str) -> Iterator[file_io.FileReader]:
    """Open a file and compare its header with the index, so that the two cannot contradict each other.

    This is repeated on each opening, since the file may have been replaced.
    """
    with plain_file(os.fspath(index.path.parent / shard)) as path, file_io.FileReader(path) as reader:
        header, manifest = read_safetensors(reader)
        listed = index.shards[shard]
        for other, names in index.shards.items():
            if other != shard and (doubled_names := names & header.tensors.keys()):
                raise in_two_shards(index, min(doubled_names), other, shard)
        if differing := listed ^ header.tensors.keys():
            raise _index_error(
                index.path,
                f"{shard} holds other tensors than it says: {first_few(sorted(differing))} is in one of them only",
            )
        if index.manifest is not None:
            entries = {name: index.manifest.tensors.get(name) for name in listed}
            if manifest is None or dict(manifest.tensors) != entries:
                raise CorruptCheckpointError(
                    f"{reader.path} is not what was written together with {index.path.name}: the hashes of its tensors "
                    f"differ. It is from another save. Load another checkpoint."
                )
        yield reader


def in_two_shards(index: ShardIndex, name: str, *shards: str) -> CorruptCheckpointError:
    """Return the error for a tensor that two files have."""
    return _index_error(index.path, f"the tensor {name!r:.200} is in two shards, {' and '.join(shards)}")


def _index_error(index: Path, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{index} is not a whole index of weights: {what}. Load another checkpoint.")


def merge_files(index: ShardIndex, open_file: Callable[[str], TensorSource]) -> TensorSource:
    """Open the files of an index as one source, which has the listed tensors that no file has as `missing`."""
    home = {name: shard for shard, names in index.shards.items() for name in names}
    tensors: dict[str, StoredTensor] = {}
    files: dict[str, int] = {}
    with ExitStack() as opened:
        for shard, listed in index.shards.items():
            source = opened.enter_context(open_file(os.fspath(path_of_shard(index, shard, listed))))
            for name in source.tensors:
                if name in tensors and name not in home:
                    raise CorruptCheckpointError(
                        f"{index.path} names {shard}, which has a tensor {name!r:.200} that a file before it has, too, "
                        f"and does not say which of them is meant. Add it to the weight_map, or use another checkpoint."
                    )
            # Except those that the index assigns to another file.
            tensors |= {name: tensor for name, tensor in source.tensors.items() if home.get(name, shard) == shard}
            files[shard] = source.size_bytes
        missing = tuple(sorted(home.keys() - tensors.keys()))
        whole = TensorSource("safetensors", tensors, sum(files.values()), index.manifest, missing=missing, files=files)
        return whole.on_close(opened.pop_all())
