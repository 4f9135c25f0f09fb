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
from composer_checkpoint.errors import CheckpointError
from composer_checkpoint.lock import LOCK_NAME
from composer_checkpoint.manifest import MANIFEST_NAME, Manifest
from composer_checkpoint.pointers import read_pointer

__all__ = ["Found", "Skipped", "find_newest"]

log = logging.getLogger(__name__)

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
    counters: tuple[int, ...] | None
    modified: float

    def sorting_key(self) -> tuple[bool, tuple[int, ...], float]:
        return self.counters is not None, self.counters or (), self.modified


def find_newest(
    folder_or_pattern: str | os.PathLike[str], *, verify: Callable[[Path], object] | None = None
) -> Found | None:
    """Return the newest checkpoint that is committed and valid, or `None` if there is none.

    The newest is the one that was trained longest by the time in its manifest, or by `ep` and `ba` in its name; where
    neither says so, the one that was modified last, after all those that do. Unfinished files are no candidates.
    A pointer such as `latest` decides nothing: it may be older than the newest checkpoint, or lead nowhere. What is
    skipped is logged as a warning, with the reason.

    Args:
        folder_or_pattern: A folder, which is looked through with the folders below it, or a pattern such as
            `'runs/*/ep*-rank0.pt'`.
        verify: Raises a `CheckpointError` or `OSError` for a path that is not a whole checkpoint.
            `composer_checkpoint.verify` when `None`.

    Returns:
        The checkpoint with what was skipped, newest first.
    """
    if verify is None:
        from composer_checkpoint.verify import verify  # it imports torch, and those who name their own need not wait
    skipped: list[Skipped] = []
    candidates: list[_Candidate] = []
    for path in _paths(os.fspath(folder_or_pattern), skipped):
        candidates.append(_candidate(path))
    found: Found | None = None
    for candidate in sorted(candidates, key=_Candidate.sorting_key, reverse=True):
        try:
            verify(candidate.path)
        except (CheckpointError, OSError) as error:
            skipped.append(Skipped(candidate.path, str(error)))
        else:
            found = Found(candidate.path, candidate.info, tuple(skipped))
            break
    _report(folder_or_pattern, found, skipped)
    return found


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
    with suppress(OSError), os.scandir(folder) as entries:
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
    return _manifest_of(path).exists() or read_pointer(path) is not None


def _is_checkpoint_folder(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in _MARKS) or any(folder.glob("__*_*.distcp"))


def _manifest_of(path: Path) -> Path:
    return path / MANIFEST_NAME if path.is_dir() else path.with_name(path.name + _FILE_MANIFEST)


def _candidate(path: Path) -> _Candidate:
    info: Mapping[str, Any] = {}
    with suppress(CheckpointError, OSError):  # verifying says what is wrong with it
        info = _info(path)
    modified = 0.0
    with suppress(OSError):
        modified = path.stat().st_mtime
    return _Candidate(path, info, _counters(info, path.name), modified)


def _info(path: Path) -> Mapping[str, Any]:
    """Return what a checkpoint's manifest says about it, as far as that is quickly read."""
    beside = _manifest_of(path)
    if beside.exists():
        return Manifest.from_json(beside.read_bytes()).info
    if path.is_dir() or not _PLAIN.search(path.name):
        return {}
    from composer_checkpoint.files import read_manifest  # it imports torch

    manifest = read_manifest(path)
    return {} if manifest is None else manifest.info


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
