"""The list of what a checkpoint holds, with a hash of each part, in JSON."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar

from composer_checkpoint._strict_json import parse_json
from composer_checkpoint.errors import CorruptCheckpointError, NewerCheckpointError
from composer_checkpoint.hashing import HASH_NAME, NUM_DIGITS

__all__ = ["FORMAT_VERSION", "MANIFEST_NAME", "FileEntry", "Manifest", "TensorEntry"]

MANIFEST_NAME = "composer_manifest.json"
"""The file of a checkpoint that has the hashes of all others."""

FORMAT_VERSION = 1
"""The version of that file's format, which is in it."""

# A million tensors need about 200 MB. More than this is an attack on the memory of who reads it.
MAX_MANIFEST_BYTES = 1 << 29
_DIGESTS = {name: re.compile(f"[0-9a-f]{{{count}}}") for name, count in NUM_DIGITS.items()}
_Entry = TypeVar("_Entry")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: what it looks like, and the hash of its elements in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    hash: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a folder, or one member of an archive."""

    size_bytes: int
    hash: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    `info` is for people and for choosing a checkpoint (versions, run, time, world size); it decides nothing about
    how bytes are read.

    Example:
        >>> manifest = Manifest(files={"__0_0.distcp": FileEntry(3, "0" * 32)}, info={"run_name": "blue-fox"})
        >>> Manifest.from_json(manifest.to_json()) == manifest
        True
    """

    format_version: int = FORMAT_VERSION
    hash_name: str = HASH_NAME
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the manifest as one line of JSON.

        Raises:
            TypeError: If `info` holds what JSON has no form for.
            ValueError: If `info` holds NaN or an infinity.
        """
        raw = {
            "format_version": self.format_version,
            "hash_name": self.hash_name,
            "tensors": {name: _fields(entry) for name, entry in self.tensors.items()},
            "files": {name: _fields(entry) for name, entry in self.files.items()},
            "info": dict(self.info),
        }
        return json.dumps(raw, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Manifest":
        """Read what `to_json` wrote.

        Raises:
            CorruptCheckpointError: If the text is not a manifest.
            NewerCheckpointError: If it is of a newer format or uses a newer hash.
        """
        if len(text) > MAX_MANIFEST_BYTES:
            raise CorruptCheckpointError(
                f"the manifest has {len(text)} bytes, more than the {MAX_MANIFEST_BYTES} that one may have. "
                f"Load another checkpoint."
            )
        try:
            raw = parse_json(text)
        except (ValueError, RecursionError) as error:  # also of JSON's decoder and of UTF-8's
            raise CorruptCheckpointError(f"the manifest is not JSON: {error}. Load another checkpoint.") from error
        if not isinstance(raw, dict):
            raise CorruptCheckpointError(
                f"the manifest is a JSON {type(raw).__name__}, not an object. Load another checkpoint."
            )
        _check_version(raw)
        return cls(
            format_version=raw["format_version"],
            hash_name=raw["hash_name"],
            tensors=_entries(raw, "tensors", _tensor_entry),
            files=_entries(raw, "files", _file_entry),
            info=_object(raw, "info"),
        )


def _fields(entry: TensorEntry | FileEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__slots__}  # asdict would copy each of them deeply


def _check_version(raw: dict[str, Any]) -> None:
    version = raw.get("format_version")
    if not _is_count(version) or version < 1:
        raise CorruptCheckpointError(
            f"the manifest's format_version is {version!r:.80}, not a whole number from 1. Load another checkpoint."
        )
    if version > FORMAT_VERSION:
        writer = _object(raw, "info").get("composer_version", "a newer composer-checkpoint")
        raise NewerCheckpointError(
            f"the checkpoint has format version {version}, written by {writer!s:.80}; this composer-checkpoint reads "
            f"up to version {FORMAT_VERSION}. Upgrade composer-checkpoint to load it."
        )
    if raw.get("hash_name") not in list(NUM_DIGITS):  # a list, since JSON may hold what has no hash
        raise NewerCheckpointError(
            f"the manifest's hashes are {raw.get('hash_name')!r:.80}, and this composer-checkpoint knows "
            f"{', '.join(NUM_DIGITS)}. Upgrade composer-checkpoint to load it."
        )


def _object(raw: dict[str, Any], name: str) -> dict[str, Any]:
    value = raw.get(name, {})
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"the manifest's {name} is {value!r:.80}, not an object. Load another checkpoint.")
    return value


def _entries(
    raw: dict[str, Any], kind: str, make: Callable[[Any, re.Pattern[str]], _Entry | None]
) -> dict[str, _Entry]:
    digest = _DIGESTS[raw["hash_name"]]
    entries: dict[str, _Entry] = {}
    for name, value in _object(raw, kind).items():
        entry = make(value, digest)
        if entry is None:
            raise CorruptCheckpointError(
                f"the manifest's entry of {name!r:.200} in {kind} is {value!r:.200}, without a valid size, shape or "
                f"hash. Load another checkpoint."
            )
        entries[name] = entry
    return entries


def _file_entry(value: Any, digest: re.Pattern[str]) -> FileEntry | None:
    match value:
        case {"size_bytes": size_bytes, "hash": str(found)} if _is_count(size_bytes) and digest.fullmatch(found):
            return FileEntry(size_bytes, found)
    return None


def _tensor_entry(value: Any, digest: re.Pattern[str]) -> TensorEntry | None:
    file_entry = _file_entry(value, digest)
    match value:
        case {"dtype": str(dtype), "shape": list(shape)} if file_entry and all(map(_is_count, shape)):
            return TensorEntry(dtype, tuple(shape), file_entry.size_bytes, file_entry.hash)
    return None


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 63
