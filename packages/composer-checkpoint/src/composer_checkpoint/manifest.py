"""Manifest of a checkpoint: a list of its content with a hash of each part, in JSON, and the seal that protects it."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from blake3 import blake3

from composer_checkpoint.errors import CorruptCheckpointError, NewerCheckpointError
from composer_checkpoint.file_io import HASH_NAME, NUM_DIGITS, hash_bytes, hash_file
from composer_checkpoint.formats._zip import Readable, ZipLayout

MANIFEST_NAME = "composer_manifest.json"
"""Name of the file that lists the hashes of all other files of a checkpoint."""

SIDECAR_SUFFIX = ".manifest.json"
"""Suffix of the manifest next to a file that cannot hold one."""

METADATA_NAME = ".metadata"
"""Name of the index of a sharded checkpoint, without which torch does not read it."""

FORMAT_VERSION = 1
"""Version of the manifest's format."""

# A million tensors take about 200 MB. A larger manifest would only exhaust the reader's memory.
MAX_MANIFEST_BYTES = 1 << 29
_DIGESTS = {name: re.compile(f"[0-9a-f]{{{count}}}") for name, count in NUM_DIGITS.items()}
_Entry = TypeVar("_Entry")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor, with the hash of its elements in row-major order."""

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
    """Content of a checkpoint.

    `info` (versions, run, time, world size) is for users and for the choice of a checkpoint; it does not affect how
    bytes are read.

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
            TypeError: If `info` cannot be represented in JSON.
            ValueError: If `info` has NaN or infinity.
        """
        raw = {
            "format_version": self.format_version,
            "hash_name": self.hash_name,
            "tensors": {name: _fields(entry) for name, entry in self.tensors.items()},
            "files": {name: _fields(entry) for name, entry in self.files.items()},
            "info": dict(self.info),
        }
        # NaN is not JSON, so other parsers would refuse the whole manifest.
        return json.dumps(raw, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Manifest":
        """Parse the result of `to_json`.

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
        except (ValueError, RecursionError) as error:  # ValueError includes the errors of the JSON and UTF-8 decoders
            raise CorruptCheckpointError(f"the manifest is not JSON: {error}. Load another checkpoint.") from error
        version = raw.get("format_version") if isinstance(raw, dict) else None
        if not _is_count(version) or version < 1:
            raise CorruptCheckpointError(
                f"the manifest's format_version is {version!r:.80}, not a whole number from 1. Load another checkpoint."
            )
        if version > FORMAT_VERSION:
            writer = _object(raw, "info").get("composer_version", "a newer composer-checkpoint")
            raise NewerCheckpointError(
                f"the checkpoint has format version {version}, written by {writer!s:.80}; this composer-checkpoint "
                f"reads up to version {FORMAT_VERSION}. Upgrade composer-checkpoint to load it."
            )
        if raw.get("hash_name") not in list(NUM_DIGITS):  # a list, since the value may be unhashable
            raise NewerCheckpointError(
                f"the manifest's hashes are {raw.get('hash_name')!r:.80}, and this composer-checkpoint knows "
                f"{', '.join(NUM_DIGITS)}. Upgrade composer-checkpoint to load it."
            )
        return cls(
            format_version=raw["format_version"],
            hash_name=raw["hash_name"],
            tensors=_entries(raw, "tensors", _tensor_entry),
            files=_entries(raw, "files", _file_entry),
            info=_object(raw, "info"),
        )


def _fields(entry: TensorEntry | FileEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__slots__}  # much faster than asdict() with its deep copies


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
    return type(value) is int and 0 <= value < 1 << 63  # `type`, since a bool is an int


PAYLOAD_FOLDER = "data/"
# The comment of a zip file before sealing, as long as the seal, which is then written over it.
EMPTY_SEAL = b"composer blake3 " + b"0" * 64
_SEAL = re.compile(rb"composer blake3 [0-9a-f]{64}")


def seal(file: Readable, layout: ZipLayout) -> bytes:
    """Return the seal of a file: the hash of all bytes except the storages and the comment."""
    hasher = blake3()
    position = 0
    # Storages are left out, since the manifest, which the seal covers, has their hashes.
    storages = [member for name, member in layout.members.items() if name.startswith(PAYLOAD_FOLDER)]
    for member in sorted(storages, key=lambda member: member.offset):
        hasher.update(file.read(position, member.offset - position))
        position = member.end
    hasher.update(file.read(position, file.size_bytes - len(layout.comment) - position))
    return b"composer blake3 " + hasher.hexdigest().encode()


def read_sealed(file: Readable, layout: ZipLayout) -> Manifest | None:
    """Verify the seal of a file and return the manifest, or `None` if the file has neither."""
    member = layout.members.get(MANIFEST_NAME)
    has_seal = _SEAL.fullmatch(layout.comment) is not None
    if member is None and not has_seal:
        return None
    # With only one of the two, the other was removed or damaged, so the file cannot be trusted.
    if member is None or not has_seal:
        missing = "the manifest among its members" if member is None else "the seal at its end"
        raise CorruptCheckpointError(
            f"the file was written with a manifest and a seal, and {missing} is missing or damaged. "
            f"Load another checkpoint."
        )
    if seal(file, layout) != layout.comment:
        raise CorruptCheckpointError(
            f"the file's description of its tensors (its pickle, manifest or headers) is not what was written: its "
            f"hash is not the one in the seal, {layout.comment.decode()!r}. Load another checkpoint."
        )
    return Manifest.from_json(file.read(member.offset, member.size_bytes))


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text, and raise a `ValueError` if a name occurs twice in an object."""
    return json.loads(text, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # `json` keeps the last of equal names, and other parsers another one, so they would read different manifests.
    found = dict(pairs)
    if len(found) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r:.200} occurs twice in one object")
    return found


_KEY = "manifest_hash"


def sealed(manifest: Manifest) -> Manifest:
    """Return the manifest with its own hash in `info`."""
    plain = Manifest.from_json(manifest.to_json())  # as it will be read back, for example with lists instead of tuples
    return replace(plain, info={**plain.info, _KEY: _hash(plain)})


def is_sealed(manifest: Manifest) -> bool:
    """Return whether a manifest has the hash that it contains."""
    return manifest.info.get(_KEY) == _hash(manifest)


def _hash(manifest: Manifest) -> str:
    info = {key: value for key, value in manifest.info.items() if key != _KEY}
    return hash_bytes(replace(manifest, info=info).to_json().encode(), manifest.hash_name)


LAYOUT_KEY = "local_layout"
"""In the content of a per-rank file: the sharding of its tensors."""

SAVE_ID_KEY = "save_id"
"""In that entry and in the manifest: the id that the files of one save have in common."""


def layout_in(content: Any, path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return the entry of a per-rank file that describes how its tensors are sharded."""
    match content.get(LAYOUT_KEY) if isinstance(content, dict) else None:
        case {"world_size": int(), "rank": int(), "tensors": dict()} as layout:
            return layout
        case _:
            raise CorruptCheckpointError(
                f"{os.fspath(path)} has no {LAYOUT_KEY!r}, so it is not a per-rank file. Load it as a single file, "
                f"with load_file()."
            )


def refuse_mixed_saves(save_ids: Sequence[Any], path: str | os.PathLike[str]) -> None:
    """Raise if the ranks' files come from several saves, as after a run that was killed while it replaced them.

    A file without a save id has `None`.
    """
    if len(set(save_ids)) > 1:
        # Reversed, so that of each save the lowest rank is named.
        kinds = {save_id: rank for rank, save_id in reversed(list(enumerate(save_ids)))}
        raise CorruptCheckpointError(
            f"{os.fspath(path)}: the files of ranks {sorted(kinds.values())} are of different saves, which were mixed "
            f"when the run was killed while it replaced them. If no run saves there, remove_leftovers(folder, "
            f"locked=True) gives the rest of the later ones their names. Otherwise load another checkpoint."
        )


def first_difference(folder: Path, manifest: Manifest) -> Path | None:
    """Return the first file of a folder that is missing or differs from its entry in the manifest, or `None`."""
    for name, entry in manifest.files.items():
        path = folder / name
        # The size first, since comparing it does not read the file.
        if not path.is_file() or path.stat().st_size != entry.size_bytes:
            return path
        if hash_file(path, manifest.hash_name) != entry.hash:
            return path
    return None
