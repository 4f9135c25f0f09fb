"""`.safetensors` files: weights only, readable by all tools for that format, with a manifest in the header."""

import json
import math
import os
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from logging import getLogger
from typing import Any, NoReturn, TypeVar

import torch
from blake3 import blake3

from composer_checkpoint._finite import PassingWeights
from composer_checkpoint._tree import doubled, path_text
from composer_checkpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from composer_checkpoint.file_io import (
    NUM_DIGITS,
    FileReader,
    FlushedFile,
    MappedFile,
    hash_ranges,
    new_hasher,
    tensor_bytes,
)
from composer_checkpoint.formats._zip import Readable
from composer_checkpoint.manifest import Manifest, TensorEntry, parse_json

__all__ = [
    "FORMAT_NAMES",
    "aliases_in",
    "by_text_names",
    "check_names",
    "load_safetensors",
    "read_safetensors",
    "save_safetensors",
    "tied_weights",
    "verify_safetensors",
    "write_safetensors",
]

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
        _refuse(f"it has {file.size_bytes} bytes, fewer than the length of a header")
    # Checked before it is read, so that a damaged length cannot allocate gigabytes.
    (length,) = LENGTH.unpack(file.read(0, LENGTH.size))
    if length > min(MAX_HEADER_BYTES, file.size_bytes - LENGTH.size):
        _refuse(f"its header would have {length} bytes; the file has {file.size_bytes}")
    raw = file.read(LENGTH.size, length)
    try:
        parsed: Any = parse_json(raw.decode())
    except (ValueError, RecursionError) as error:
        _refuse(f"its header is not JSON: {error!s:.200}")
    if not isinstance(parsed, dict):
        _refuse("its header is not an object")
    metadata = parsed.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        _refuse("its metadata is not texts by name")
    start = LENGTH.size + length
    tensors = {name: _slot(name, value, start) for name, value in parsed.items()}
    position = start
    # The format forbids gaps and overlaps. Empty tensors sort before the one that starts at the same byte.
    for name, slot in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size_bytes)):
        if slot.offset != position:
            _refuse(f"its tensor {name!r:.200} starts at byte {slot.offset}, where {position} was expected")
        position += slot.size_bytes
    if position != file.size_bytes:
        _refuse(f"its tensors end at byte {position}, and the file has {file.size_bytes}")
    return Header(tensors, metadata, raw)


def _slot(name: str, value: Any, start: int) -> TensorSlot:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if dtype in DTYPES:
            torch_dtype, item_bytes = DTYPES[dtype]
        case _:
            torch_dtype, item_bytes, shape, begin, end = "", 0, [], 0, -1  # refused below
    is_shape = len(shape) <= _MAX_DIMS and all(type(size) is int and 0 <= size < 1 << 63 for size in shape)
    if not is_shape or not 0 <= begin <= end or math.prod(shape) * item_bytes != end - begin:
        _refuse(f"its tensor {name!r:.200} is described as {value!r:.200}, whose dtype, shape and bytes do not fit")
    return TensorSlot(torch_dtype, tuple(shape), start + begin, end - begin)


def _refuse(what: str) -> NoReturn:
    raise CorruptCheckpointError(f"the file is not a whole safetensors file: {what}. Load another checkpoint.")


log = getLogger(__name__)

T = TypeVar("T")

_MANIFEST_KEY = "composer_manifest"
_SEAL_KEY = "composer_seal"
_NO_SEAL = "0" * 64
_SEAL = re.compile(rb'"composer_seal":"([0-9a-f]{64})"')
_MAX_NAMES = 10
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
        if tensor.layout != torch.strided or str(tensor.dtype).removeprefix("torch.") not in FORMAT_NAMES:
            raise TypeError(f"{first} is {tensor.dtype} of layout {tensor.layout}, which safetensors has no form for.")
    check_names([*tensors, *aliases])
    notes = {**info, **({"aliases": aliases} if aliases else {}), **({"layout": "composer"} if is_state else {})}
    return write_safetensors(tensors, path, notes, hash_name)


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


def write_safetensors(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    info: Mapping[str, Any],
    hash_name: str,
    read: Callable[[Any], torch.Tensor] = lambda tensor: tensor,
    progress: Callable[[int], object] | None = None,
) -> Manifest:
    """Write a file, and flush it to the disk.

    Args:
        tensors: Objects with a dtype and a shape by name.
        path: Path of the file.
        info: Entries of the manifest.
        hash_name: As for `save_file`.
        read: Function that returns the tensor for such an object. Each is read only when it is written.
        progress: Called with the number of bytes after each tensor.
    """
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # largest items first, so all are aligned
    tensors = {name: tensors[name] for name in names}
    hashes = dict.fromkeys(names, "0" * NUM_DIGITS[hash_name])
    with open(path, "wb", buffering=0) as file:
        disk = FlushedFile(file)
        # The header comes first in the file and holds the hashes, so a placeholder of equal length reserves its place.
        disk.write(memoryview(_header_of(tensors, hashes, info, hash_name)[0]))
        for name, tensor in tensors.items():
            hasher, data = new_hasher(hash_name), tensor_bytes(read(tensor))
            disk.write(data, hasher)
            hashes[name] = hasher.hexdigest()
            if progress is not None:
                progress(data.nbytes)
        header, manifest = _header_of(tensors, hashes, info, hash_name)
        disk.rewrite(memoryview(header), 0)
        disk.finish()
    return manifest


def load_safetensors(
    reader: FileReader, *, map_location: Any, verify: bool
) -> tuple[Any, Manifest | None, Collection[str]]:
    """Check and load a safetensors file.

    Returns:
        The weights in the form in which they were saved, the manifest if any, and the weights known to be finite.
    """
    from safetensors.torch import load_file  # here, since it imports NumPy and not all users need the format

    header, manifest = read_safetensors(reader)
    finite: Collection[str] = ()
    if verify:
        finite = _verify_payload(reader, header, manifest, MappedFile(reader))  # load_file() maps the file as well
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


def verify_safetensors(reader: FileReader) -> Manifest | None:
    """Compare every byte with its hash; return the manifest, or `None` if the file has none."""
    header, manifest = read_safetensors(reader)
    _verify_payload(reader, header, manifest)
    return manifest


def read_safetensors(reader: FileReader) -> tuple[Header, Manifest | None]:
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


def check_names(names: Collection[str]) -> None:
    """Refuse the one name that the format reserves, and names that its own reader cannot decode."""
    if METADATA_KEY in names:
        raise IncompatibleCheckpointError(
            f"a tensor is called {METADATA_KEY!r}, which the .safetensors format reserves for its metadata. Give it "
            f"another name, or write a .pt file."
        )
    for name in names:
        if not name.isascii() and name.encode(errors="replace").decode() != name:
            raise IncompatibleCheckpointError(
                f"a tensor is called {name!r:.200}, which is no text of Unicode, as the names in a .safetensors file "
                f"are. Give it another name, or write a .pt file."
            )


def _header_of(
    tensors: Mapping[str, Any], hashes: Mapping[str, str], info: Mapping[str, Any], hash_name: str
) -> tuple[bytes, Manifest]:
    """Return the file's bytes before the tensors, whose length does not depend on the hashes, and the manifest."""
    slots: dict[str, Any] = {}
    entries: dict[str, TensorEntry] = {}
    position = 0
    for name, tensor in tensors.items():
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        size_bytes = math.prod(shape) * tensor.dtype.itemsize
        end = position + size_bytes
        slots[name] = {"dtype": FORMAT_NAMES[dtype], "shape": shape, "data_offsets": (position, end)}
        entries[name] = TensorEntry(dtype, shape, size_bytes, hashes[name])
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
    reader: FileReader, header: Header, manifest: Manifest | None, mapped: MappedFile | None = None
) -> Collection[str]:
    """Compare all tensors with their hashes; return the names of those that were seen to be finite."""
    if manifest is None:
        return ()
    ranges = [(slot.offset, slot.size_bytes) for slot in header.tensors.values()]
    passing = PassingWeights({name: (index, slot.dtype) for index, (name, slot) in enumerate(header.tensors.items())})
    hashes = hash_ranges(reader, ranges, manifest.hash_name, mapped=mapped, look=passing.look)
    wrong = [name for name, found in zip(header.tensors, hashes, strict=True) if found != manifest.tensors[name].hash]
    if wrong:
        raise CorruptCheckpointError(
            f"the bytes of {', '.join(wrong[:_MAX_NAMES])} are not those that were written ({len(wrong)} of "
            f"{len(hashes)} hashes differ; the first is at byte {header.tensors[wrong[0]].offset}). "
            f"Load another checkpoint."
        )
    return passing.finite()
