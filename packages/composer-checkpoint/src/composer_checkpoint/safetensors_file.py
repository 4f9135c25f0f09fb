"""The `.safetensors` file: weights only, for everybody who reads that format, with a manifest in its header."""

import json
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from logging import getLogger
from typing import Any, TypeVar

import torch
from blake3 import blake3

from composer_checkpoint._early_flush import FlushedFile
from composer_checkpoint._file_reader import FileReader
from composer_checkpoint._finite import PassingWeights
from composer_checkpoint._joined_names import doubled, path_text
from composer_checkpoint._mapped_file import MappedFile
from composer_checkpoint._payload_hashing import hash_ranges
from composer_checkpoint._safetensors_header import DTYPES, LENGTH, METADATA_KEY, Header, read_header
from composer_checkpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from composer_checkpoint.hashing import NUM_DIGITS, new_hasher, tensor_bytes
from composer_checkpoint.manifest import Manifest, TensorEntry

__all__ = [
    "FORMAT_NAMES",
    "by_text_names",
    "header_of",
    "load_safetensors",
    "read_safetensors",
    "check_names",
    "save_safetensors",
    "verify_safetensors",
]

log = getLogger(__name__)

T = TypeVar("T")

_MANIFEST_KEY = "composer_manifest"
_SEAL_KEY = "composer_seal"
_NO_SEAL = "0" * 64
_SEAL = re.compile(rb'"composer_seal":"([0-9a-f]{64})"')
_MAX_NAMES = 10
FORMAT_NAMES = {torch_name: name for name, (torch_name, _) in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Weights:
    """Tensors by name, the names that are the same tensor as another, and whether they came inside a state."""

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]
    is_state: bool


def save_safetensors(obj: Any, path: str, info: Mapping[str, Any], hash_name: str) -> Manifest:
    """Write the weights of a state, or a flat dict of tensors, and flush them to the disk."""
    weights = _weights_of(obj)
    notes: dict[str, Any] = {"aliases": weights.aliases} if weights.aliases else {}
    if weights.is_state:
        notes["layout"] = "composer"
    info = {**info, **notes}
    names = sorted(weights.tensors, key=lambda name: -weights.tensors[name].element_size())  # so that all are aligned
    tensors = {name: weights.tensors[name] for name in names}
    no_hashes = dict.fromkeys(names, "0" * NUM_DIGITS[hash_name])
    placeholder, _ = header_of(tensors, no_hashes, info, hash_name)
    with open(path, "wb", buffering=0) as file:
        disk = FlushedFile(file)
        disk.write(memoryview(placeholder))
        hashes = {name: _write_tensor(disk, tensor, hash_name) for name, tensor in tensors.items()}
        header, manifest = header_of(tensors, hashes, info, hash_name)
        disk.rewrite(memoryview(header), 0)
        disk.finish()
    return manifest


def load_safetensors(
    reader: FileReader, *, map_location: Any, verify: bool
) -> tuple[Any, Manifest | None, Collection[str]]:
    """Check and load a safetensors file.

    Returns:
        Its weights in the form in which they were saved, its manifest, and the names of weights seen to be finite.
    """
    from safetensors.torch import load_file  # it and NumPy load only where somebody uses the format

    header, manifest = read_safetensors(reader)
    finite: Collection[str] = ()
    if verify:
        finite = _verify_payload(reader, header, manifest, MappedFile(reader))  # as the tensors will be
    device = map_location if isinstance(map_location, str | int) else str(map_location or "cpu")
    tensors: dict[str, Any] = load_file(reader.own_path, device=device)
    tensors = {name: tensors[name] for name in header.tensors}
    info = {} if manifest is None else manifest.info
    for alias, name in dict(info.get("aliases", ())).items():
        if name not in tensors:
            raise CorruptCheckpointError(
                f"{alias!r:.200} is another name of {name!r:.200}, and the file lacks that. Load another checkpoint."
            )
        tensors[alias] = tensors[name]
    if info.get("layout") != "composer":
        return tensors, manifest, finite
    return {"state": {"model": OrderedDict(tensors)}}, manifest, {f"state/model/{name}" for name in finite}


def verify_safetensors(reader: FileReader) -> Manifest | None:
    """Compare every byte with its hash; return the manifest, or `None` if the file has none."""
    header, manifest = read_safetensors(reader)
    _verify_payload(reader, header, manifest)
    return manifest


def read_safetensors(reader: FileReader) -> tuple[Header, Manifest | None]:
    """Read and check the header."""
    header = read_header(reader)
    marks = [key for key in (_MANIFEST_KEY, _SEAL_KEY) if key in header.metadata]
    if not marks:
        return header, None
    match = _SEAL.search(header.raw)
    if len(marks) < 2 or match is None:
        raise CorruptCheckpointError(
            f"the file was written with a manifest and a seal, and has only {marks}. Load another checkpoint."
        )
    unsealed = header.raw[: match.start(1)] + _NO_SEAL.encode() + header.raw[match.end(1) :]
    if blake3(unsealed).hexdigest() != match[1].decode():
        raise CorruptCheckpointError(
            "the file's header (names, dtypes, shapes or hashes) is not what was written. Load another checkpoint."
        )
    manifest = Manifest.from_json(header.metadata[_MANIFEST_KEY])
    if manifest.tensors.keys() != header.tensors.keys():
        raise CorruptCheckpointError("the manifest lists other tensors than the file has. Load another checkpoint.")
    return header, manifest


def _weights_of(obj: Any) -> _Weights:
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
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in by_text_names(weights).items():
        if tensor.layout != torch.strided or (dtype := str(tensor.dtype).removeprefix("torch.")) not in FORMAT_NAMES:
            raise TypeError(f"{name} is {tensor.dtype} of layout {tensor.layout}, which safetensors has no form for.")
        lazily = (tensor.is_conj(), tensor.is_neg())
        identity = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), dtype, lazily)
        if tensor.numel() and identity in seen:
            aliases[name] = seen[identity]
        else:
            seen[identity] = name
            tensors[name] = tensor
    check_names([*tensors, *aliases])
    return _Weights(tensors, aliases, is_state)


def by_text_names(weights: Mapping[Any, T]) -> dict[str, T]:
    """Return weights by their keys as texts, which names in a file are.

    Raises:
        IncompatibleCheckpointError: If two keys become one text, as 1 and `'1'` do.
    """
    keys: dict[str, Any] = {}
    for key in weights:
        if keys.setdefault(str(key), key) is not key:
            raise doubled(path_text([keys[str(key)]]), path_text([key]), str(key), "a .safetensors file")
    return {name: weights[key] for name, key in keys.items()}


def check_names(names: Collection[str]) -> None:
    """Refuse the name that safetensors has for something else, and those that its own reader cannot read.

    Raises:
        IncompatibleCheckpointError: If there is one.
    """
    if METADATA_KEY in names:
        raise IncompatibleCheckpointError(
            f"a tensor is called {METADATA_KEY!r}, where a .safetensors file has what is said of it. Give it another "
            f"name, or write a .pt file."
        )
    for name in names:
        if not name.isascii() and name.encode(errors="replace").decode() != name:
            raise IncompatibleCheckpointError(
                f"a tensor is called {name!r:.200}, which is no text of Unicode, as the names in a .safetensors file "
                f"are. Give it another name, or write a .pt file."
            )


def header_of(
    tensors: Mapping[str, torch.Tensor], hashes: Mapping[str, str], info: Mapping[str, Any], hash_name: str
) -> tuple[bytes, Manifest]:
    """Return the file's bytes up to the tensors, as long for one set of hashes as for another."""
    slots: dict[str, Any] = {}
    entries: dict[str, TensorEntry] = {}
    position = 0
    for name, tensor in tensors.items():
        dtype, shape, size_bytes = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes
        end = position + size_bytes
        slots[name] = {"dtype": FORMAT_NAMES[dtype], "shape": shape, "data_offsets": (position, end)}
        entries[name] = TensorEntry(dtype, shape, size_bytes, hashes[name])
        position = end
    manifest = Manifest(hash_name=hash_name, tensors=entries, info=info)
    metadata = {"format": "pt", _MANIFEST_KEY: manifest.to_json(), _SEAL_KEY: _NO_SEAL}
    text = json.dumps({METADATA_KEY: metadata, **slots}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sealed = text.replace(
        f'"{_SEAL_KEY}":"{_NO_SEAL}"'.encode(), f'"{_SEAL_KEY}":"{blake3(text).hexdigest()}"'.encode(), 1
    )
    return LENGTH.pack(len(sealed)) + sealed, manifest


def _write_tensor(file: FlushedFile, tensor: torch.Tensor, hash_name: str) -> str:
    hasher = new_hasher(hash_name)
    file.write(tensor_bytes(tensor), hasher)
    return hasher.hexdigest()


def _verify_payload(
    reader: FileReader, header: Header, manifest: Manifest | None, mapped: MappedFile | None = None
) -> Collection[str]:
    """Compare all tensors with their hashes; return the names of those that are finite, as far as was seen."""
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
