"""The newest checkpoint that is whole."""

import glob
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_checkpoint._unfinished_names import is_unfinished
from composer_checkpoint.errors import CheckpointError, NewerCheckpointError, StorageError
from composer_checkpoint.lock import LOCK_NAME
from composer_checkpoint.manifest import MANIFEST_NAME, Manifest
from composer_checkpoint.pointers import read_pointer

__all__ = [
    "LINEAGE_KEY",
    "WITHOUT_MANIFEST",
    "Found",
    "Skipped",
    "find_newest",
    "is_later",
    "is_name_of_file",
    "is_of_other_lineage",
    "look_through",
    "told_abandoned",
]

log = logging.getLogger(__name__)

LINEAGE_KEY = "lineage"
"""In a manifest's information: what all checkpoints of a run, and of those that resume it by themselves, share."""

WITHOUT_MANIFEST = "it has no manifest, and other checkpoints here have one"
"""The reason for which a checkpoint is skipped that somebody else has put there."""

_FILE_MANIFEST = ".manifest.json"
_SUFFIX = re.compile(r"\.(pt|pth|bin|safetensors|tar|tgz|pt\.[a-z0-9]+|tar\.[a-z0-9]+)$", re.IGNORECASE)
# Others would have to be unpacked.
_PLAIN = re.compile(r"\.(pt|pth|bin|safetensors)$", re.IGNORECASE)
# What a folder holds that is a checkpoint itself: the manifest of ours, the index of torch's, the parts of the
# modular layout.
_MARKS = (MANIFEST_NAME, ".metadata", "composer_metadata.json", "model.safetensors.index.json")
_COUNTERS = ("batch", "sample", "token", "epoch", "iteration")
_NUMBERS_IN_NAME = re.compile(r"(?:^|[^a-z])(ep|ba)([0-9]+)", re.IGNORECASE)
_UNITS = {"ba": "batch", "ep": "epoch"}


@dataclass(frozen=True, slots=True)
class Skipped:
    """What looked like a checkpoint and is not a whole one."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """The newest whole checkpoint, with its manifest's information, and what was newer but could not be used."""

    path: Path
    info: Mapping[str, Any]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True, slots=True)
class _Candidate:
    path: Path
    info: Mapping[str, Any]
    is_sealed: bool | None  # None where finding out would take unpacking it, or it is damaged
    counters: tuple[int, ...] | None
    modified: float

    def sorting_key(self) -> tuple[bool, tuple[int, ...], float]:
        return self.counters is not None, self.counters or (), self.modified

    def is_abandoned(self, latest: "_Candidate | None") -> bool:
        """Return whether this is a later one of a run to which the one that the pointer leads to does not belong."""
        if latest is None or not self.is_sealed or not is_of_other_lineage(self.info, latest.info):
            return False
        return self.sorting_key()[:2] > latest.sorting_key()[:2]


def find_newest(
    folder_or_pattern: str | os.PathLike[str], *, verify: Callable[[Path], object] | None = None
) -> Found | None:
    """Return the newest checkpoint that is committed and valid, or `None` if there is none.

    The newest is the one that was trained longest by the time in its manifest, or by `ep` and `ba` in its name; where
    neither says so, the one that was modified last, after all those that do. Unfinished files are no candidates.
    A pointer such as `latest` decides nothing: it may be older than the newest checkpoint, or lead nowhere. What has no
    manifest counts only where nothing has one. What is skipped is logged as a warning, with the reason.

    Args:
        folder_or_pattern: A folder, which is looked through with the folders below it, or a pattern such as
            `'runs/*/ep*-rank0.pt'`.
        verify: Raises a `CheckpointError` for a path that is not a whole checkpoint. `composer_checkpoint.verify` when
            `None`.

    Returns:
        The checkpoint with what was skipped, newest first.

    Raises:
        NewerCheckpointError: If the newest is of a newer format: who goes on with an older one loses work.
        StorageError: If the disk fails, or does not let us read.
    """
    found, _ = look_through(folder_or_pattern, verify=verify)
    return found


def look_through(
    folder_or_pattern: str | os.PathLike[str],
    *,
    verify: Callable[[Path], object] | None = None,
    latest: Path | None = None,
) -> tuple[Found | None, tuple[Skipped, ...]]:
    """Find the newest checkpoint as `find_newest` does, and return what was skipped also where there is none.

    Args:
        folder_or_pattern: As there.
        verify: As there.
        latest: What the pointer leads to. Later ones that are not of its lineage are skipped: they are of a run that
            somebody has gone back from.
    """
    if verify is None:
        from composer_checkpoint.verify import verify  # it imports torch, and those who name their own need not wait
    skipped: list[Skipped] = []
    candidates = [_candidate(path) for path in _paths(os.fspath(folder_or_pattern), skipped)]
    any_sealed = any(candidate.is_sealed for candidate in candidates)
    pointed = None if latest is None else _candidate(latest)
    found: Found | None = None
    for candidate in sorted(candidates, key=_Candidate.sorting_key, reverse=True):
        if candidate.is_sealed is False and any_sealed:
            skipped.append(Skipped(candidate.path, WITHOUT_MANIFEST))
        elif candidate.is_abandoned(pointed):
            skipped.append(Skipped(candidate.path, told_abandoned(latest)))
        elif (reason := _fault_of(candidate.path, verify)) is not None:
            skipped.append(Skipped(candidate.path, reason))
        else:
            found = Found(candidate.path, candidate.info, tuple(skipped))
            break
    _report(folder_or_pattern, found, skipped)
    return found, tuple(skipped)


def is_of_other_lineage(info: Mapping[str, Any], latest: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint, by its manifest's information, is of another lineage than the latest one."""
    lineage = latest.get(LINEAGE_KEY)
    return lineage is not None and info.get(LINEAGE_KEY) != lineage


def told_abandoned(latest: object) -> str:
    """Return the reason for which a later checkpoint of another lineage is skipped."""
    return f"it is of a run that somebody has gone back from: the latest one is {latest}"


def is_later(path: Path, timestamp: Any) -> bool:
    """Return whether a checkpoint, by its manifest or else its name, is of later in training than a `Timestamp`."""
    candidate = _candidate(path)
    counts = dict(zip(_COUNTERS, candidate.counters or (), strict=False))
    return any(counts.get(unit, 0) > int(getattr(timestamp, unit)) for unit in ("batch", "epoch"))


def is_name_of_file(name: str) -> bool:
    """Return whether a checkpoint of this name is one file, by its suffix, such as `.pt` or `.safetensors`."""
    return _SUFFIX.search(name) is not None


def _fault_of(path: Path, verify: Callable[[Path], object]) -> str | None:
    """Return what is wrong with a checkpoint, or `None` if it is whole.

    Raises:
        NewerCheckpointError, StorageError: If nothing is wrong with it, and it cannot be read here or now.
    """
    try:
        verify(path)
    except NewerCheckpointError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        return str(error)
    except OSError as error:
        raise StorageError(
            error.errno,
            f"{path} cannot be read: {error.strerror or error}. Going on with an older checkpoint would lose work. "
            f"Look at the disk and the permissions, or name a checkpoint with load_path",
        ) from error
    except CheckpointError as error:
        return str(error)
    return None


def _report(where: str | os.PathLike[str], found: Found | None, skipped: list[Skipped]) -> None:
    for skip in skipped:
        log.warning("Skipped %s: %s", skip.path, skip.reason)
    if found is not None:
        log.info("The newest whole checkpoint of %s is %s.", where, found.path)
    elif skipped:
        log.warning("None of the %d checkpoints of %s is whole.", len(skipped), where)


def _paths(where: str, skipped: list[Skipped]) -> Iterator[Path]:
    """Go through the candidates, each once whatever points to it."""
    seen: set[Path] = set()
    starts = [Path(where)] if os.path.isdir(where) else map(Path, glob.iglob(where, recursive=True))
    for start in starts:
        inside = start.is_dir() and not _is_checkpoint_folder(start)
        for path in _below(start) if inside else [start]:
            target = read_pointer(path)
            if target is not None and not target.exists():
                skipped.append(Skipped(path, f"it points to {target}, which does not exist"))
                continue
            real = Path(os.path.realpath(target or path))
            if real not in seen and not is_unfinished(real.name) and (target is None or _could_be(real)):
                seen.add(real)
                yield target or path


def _below(folder: Path) -> Iterator[Path]:
    """Go through a folder of checkpoints, without looking into those that are checkpoints themselves."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            path = Path(entry)
            if entry.name.startswith(".") or is_unfinished(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False) and not _is_checkpoint_folder(path):
                yield from _below(path)
            elif entry.is_symlink() or _could_be(path):
                yield path


def _could_be(path: Path) -> bool:
    if path.is_dir():
        return _is_checkpoint_folder(path)
    if path.name == LOCK_NAME or path.name.endswith((_FILE_MANIFEST, ".symlink")):
        return False
    if _SUFFIX.search(path.name) or (not path.suffix and _NUMBERS_IN_NAME.search(path.name)):
        return True
    return _manifest_beside(path).exists() or read_pointer(path) is not None


def _is_checkpoint_folder(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in _MARKS) or any(folder.glob("__*_*.distcp"))


def _manifest_beside(path: Path) -> Path:
    return path / MANIFEST_NAME if path.is_dir() else path.with_name(path.name + _FILE_MANIFEST)


def _candidate(path: Path) -> _Candidate:
    info: Mapping[str, Any] = {}
    is_sealed: bool | None = None
    with suppress(CheckpointError, OSError):  # verifying says what is wrong with it
        if _has_manifest_at_hand(path):
            manifest = _manifest_of(path)
            info, is_sealed = ({}, False) if manifest is None else (manifest.info, True)
    modified = 0.0
    with suppress(OSError):
        modified = path.stat().st_mtime
    return _Candidate(path, info, is_sealed, _counters(info, path.name), modified)


def _has_manifest_at_hand(path: Path) -> bool:
    """Return whether a manifest, if there is one, can be read without unpacking anything."""
    return path.is_dir() or not path.suffix or bool(_PLAIN.search(path.name)) or _manifest_beside(path).exists()


def _manifest_of(path: Path) -> Manifest | None:
    beside = _manifest_beside(path)
    if beside.exists():
        return Manifest.from_json(beside.read_bytes())
    if path.is_dir():
        return None
    from composer_checkpoint.files import read_manifest  # it imports torch

    return read_manifest(path)


def _counters(info: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    """Return how far training had come, as numbers that compare."""
    time = info.get("timestamp")
    if isinstance(time, Mapping):
        time = time.get("Timestamp", time)  # as a whole state's dict has it
    if isinstance(time, Mapping):
        known = {unit: time.get(unit) for unit in _COUNTERS}
    else:
        known = {_UNITS[unit.lower()]: int(number) for unit, number in _NUMBERS_IN_NAME.findall(name)}
    counts = tuple(count if isinstance(count := known.get(unit), int) else 0 for unit in _COUNTERS)
    return counts if any(known.get(unit) is not None for unit in _COUNTERS) else None
