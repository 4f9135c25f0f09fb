"""Search a run's folder for its newest complete checkpoint and for conflicting later ones, and lock it."""

import glob
import logging
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from composer_checkpoint._ranks import Ranks
from composer_checkpoint.commit import read_pointer, refuse_folder
from composer_checkpoint.errors import (
    CheckpointConflictError,
    CheckpointError,
    NewerCheckpointError,
    StorageError,
    first_few,
)
from composer_checkpoint.lock import LOCK_NAME, FolderLock, remove_leftovers
from composer_checkpoint.manifest import MANIFEST_NAME, METADATA_NAME, SIDECAR_SUFFIX, Manifest
from composer_checkpoint.names import PartialFilePath, is_unfinished, placeholders
from composer_checkpoint.stores.base import ObjectStore
from composer_checkpoint.stores.opening import list_if_allowed
from composer_events.formatting import format_name_with_dist
from composer_events.state import State
from composer_time import Timestamp

log = logging.getLogger(__name__)

LINEAGE_KEY = "lineage"
"""Key of the id in a manifest's information that all checkpoints of a run, and of its resumes, share."""

WITHOUT_MANIFEST = "it has no manifest, and other checkpoints here have one"
"""Reason to skip a file of another program, such as exported weights."""

_SUFFIX = re.compile(r"\.(pt|pth|bin|safetensors|tar|tgz|pt\.[a-z0-9]+|tar\.[a-z0-9]+)$", re.IGNORECASE)
# Formats whose manifest can be read in place; other files would have to be unpacked first.
_PLAIN = re.compile(r"\.(pt|pth|bin|safetensors)$", re.IGNORECASE)
# Files that mark a folder as a checkpoint: our manifest, torch's index, and the files of the modular layout.
_MARKS = (MANIFEST_NAME, METADATA_NAME, "composer_metadata.json", "model.safetensors.index.json")
_COUNTERS = ("batch", "sample", "token", "epoch", "iteration")
_NUMBERS_IN_NAME = re.compile(r"(?:^|[^a-z])(ep|ba)([0-9]+)", re.IGNORECASE)
_UNITS_BY_VALUE = {"ba": "batch", "ep": "epoch"}


@dataclass(frozen=True, slots=True)
class Skipped:
    """A path that looked like a checkpoint but is not a complete one."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """The newest complete checkpoint, its manifest's information, and newer ones that could not be used."""

    path: Path
    info: Mapping[str, Any]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A path that may be a complete checkpoint."""

    path: Path
    info: Mapping[str, Any]
    is_sealed: bool | None  # None if unknown without unpacking the file, or damaged
    counters: tuple[int, ...] | None
    modified: float

    def sorting_key(self) -> tuple[bool, tuple[int, ...], float]:
        """Return the key of the order, in which modification times decide last, since copying files changes them."""
        return self.counters is not None, self.counters or (), self.modified


def find_newest(
    folder_or_pattern: str | os.PathLike[str], *, verify: Callable[[Path], object] | None = None
) -> Found | None:
    """Return the newest checkpoint that is committed and valid, or `None`.

    The newest is the one that has trained longest by the time in its manifest, or by `ep` and `ba` in its name.
    Checkpoints with neither come after these, ordered by modification time. Unfinished files are ignored. A pointer
    such as `latest` is not used, since it may be outdated or dangling. Checkpoints without a manifest count only if
    none has one. Skipped checkpoints are logged as warnings, with the reason.

    Args:
        folder_or_pattern: A folder, which is searched recursively, or a pattern such as `'runs/*/ep*-rank0.pt'`.
        verify: Raises a `CheckpointError` for a path that is not a complete checkpoint. `composer_checkpoint.verify`
            when `None`.

    Returns:
        The checkpoint, with the skipped ones, newest first.

    Raises:
        NewerCheckpointError: If the newest is of a newer format: resuming from an older one would lose work.
        StorageError: If the disk fails or denies access.
    """
    if verify is None:
        from composer_checkpoint.verify import verify  # imported late, since it imports torch
    candidates, skipped = candidates_in(folder_or_pattern)
    found: Found | None = None
    for candidate in candidates:
        fault = fault_of(candidate.path, lambda path=candidate.path: verify(path))
        if fault is None:
            found = Found(candidate.path, candidate.info, tuple(skipped))
            log.info("The newest complete checkpoint in %s is %s.", folder_or_pattern, found.path)
            break
        skipped.append(Skipped(candidate.path, str(fault)))
        log.warning("Skipped %s: %s", candidate.path, fault)
    if found is None and skipped:
        log.warning("None of the %d checkpoints in %s is complete.", len(skipped), folder_or_pattern)
    return found


def candidates_in(folder_or_pattern: str | os.PathLike[str]) -> tuple[list[Candidate], list[Skipped]]:
    """Return the possible checkpoints as in `find_newest`, newest first and not verified, and what was skipped."""
    skipped: list[Skipped] = []
    found = [_candidate(path) for path in _paths(os.fspath(folder_or_pattern), skipped)]
    found.sort(key=Candidate.sorting_key, reverse=True)
    newest_sealed = next((index for index, candidate in enumerate(found) if candidate.is_sealed), None)
    if newest_sealed is not None:
        later = found[:newest_sealed]
        skipped += [Skipped(candidate.path, WITHOUT_MANIFEST) for candidate in later if candidate.is_sealed is False]
        found = [candidate for candidate in found if candidate.is_sealed is not False]
    for skip in skipped:
        log.warning("Skipped %s: %s", skip.path, skip.reason)
    return found, skipped


def is_name_of_file(name: str) -> bool:
    """Return whether a checkpoint of this name is a single file, by a suffix such as `.pt` or `.safetensors`."""
    return _SUFFIX.search(name) is not None


def fault_of(name: object, check: Callable[[], object]) -> Exception | None:
    """Return the error of a check for which a checkpoint is to be skipped, or `None`.

    Raise a `NewerCheckpointError` if the checkpoint is valid, so that skipping it would lose work, and a `StorageError`
    if it could not be read, and may be valid.
    """
    try:
        check()
    except (NewerCheckpointError, StorageError):
        raise
    except (CheckpointError, FileNotFoundError, NotADirectoryError, NotImplementedError) as error:
        return error  # damaged, or for example deleted since it was listed
    except OSError as error:
        raise StorageError(
            error.errno,
            f"{name} cannot be read: {error.strerror or error}. Resuming from an older checkpoint would lose work. "
            f"Check the disk and the permissions, or name a checkpoint with load_path",
        ) from error
    return None


def _paths(where: str, skipped: list[Skipped]) -> Iterator[Path]:
    """Yield each candidate once, no matter how many links lead to it."""
    seen: set[Path] = set()
    # A folder's name is not taken as a pattern, since it may have brackets.
    starts = [Path(where)] if os.path.isdir(where) else map(Path, glob.iglob(where, recursive=True))
    for start in starts:
        inside = start.is_dir() and not _is_checkpoint_folder(start)
        for path in _below(start) if inside else [start]:
            target = read_pointer(path)
            if target is not None and not target.exists():
                skipped.append(Skipped(path, f"it points to {target}, which does not exist"))
                continue
            real = Path(os.path.realpath(target or path))  # a pointer and its target are the same candidate
            if real not in seen and not is_unfinished(real.name) and (target is None or _could_be(real)):
                seen.add(real)
                yield target or path


def _below(folder: Path) -> Iterator[Path]:
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
    if path.name == LOCK_NAME or path.name.endswith((SIDECAR_SUFFIX, ".symlink")):
        return False
    # Also names without a suffix, such as the default of `save_checkpoint`, but not `ep1-ba2.log`.
    if _SUFFIX.search(path.name) or (not path.suffix and _NUMBERS_IN_NAME.search(path.name)):
        return True
    return _manifest_beside(path).exists() or read_pointer(path) is not None


def _is_checkpoint_folder(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in _MARKS) or any(folder.glob("__*_*.distcp"))


def _manifest_beside(path: Path) -> Path:
    return path / MANIFEST_NAME if path.is_dir() else path.with_name(path.name + SIDECAR_SUFFIX)


def _candidate(path: Path) -> Candidate:
    info: Mapping[str, Any] = {}
    is_sealed: bool | None = None
    with suppress(CheckpointError, OSError):  # `verify` reports the error later
        # Only if nothing has to be unpacked, since the folder may hold many large archives.
        if path.is_dir() or not path.suffix or _PLAIN.search(path.name) or _manifest_beside(path).exists():
            manifest = manifest_of(path)
            info, is_sealed = ({}, False) if manifest is None else (manifest.info, True)
    modified = 0.0
    with suppress(OSError):
        modified = path.stat().st_mtime
    return Candidate(path, info, is_sealed, _counters(info, path.name), modified)


def manifest_of(path: Path) -> Manifest | None:
    """Return the manifest inside or next to a checkpoint, or `None`."""
    beside = _manifest_beside(path)
    if beside.exists():
        return Manifest.from_json(beside.read_bytes())
    if path.is_dir():
        return None
    from composer_checkpoint.files import read_manifest  # imported late, since it imports torch

    return read_manifest(path)


def _counters(info: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    time = info.get("timestamp")
    if isinstance(time, Mapping):
        time = time.get("Timestamp", time)  # nested in the state dict of a training state
    if isinstance(time, Mapping):
        known = {unit: time.get(unit) for unit in _COUNTERS}
    else:
        known = {_UNITS_BY_VALUE[unit.lower()]: int(number) for unit, number in _NUMBERS_IN_NAME.findall(name)}
    counts = tuple(count if isinstance(count := known.get(unit), int) else 0 for unit in _COUNTERS)
    return counts if any(known.get(unit) is not None for unit in _COUNTERS) else None


_MAKES_WHOLE = (MANIFEST_NAME, METADATA_NAME)
_UNITS_IN_EPOCH = ("batch_in_epoch", "sample_in_epoch", "token_in_epoch")
_NUMBERS = {*_COUNTERS, *_UNITS_IN_EPOCH, "rank", "local_rank", "world_size", "local_world_size", "node_rank"}


def find_conflicts(names: Iterable[str], filename: str, timestamp: Timestamp) -> list[str]:
    """Return the names that a run at this time may give to checkpoints that it has yet to save.

    A name conflicts if it matches the template and any of its numbers is later than the timestamp's. Numbers inside an
    epoch are compared only within the same epoch.

    Args:
        names: Paths of files and folders, relative to the folder of checkpoints.
        filename: The template, such as `'ep{epoch}-ba{batch}.pt'`.
        timestamp: The time of the run.

    Raises:
        ValueError: If the template counts inside epochs without `{epoch}`, so that the order of names is unknown.

    Example:
        >>> from composer_time import Timestamp
        >>> find_conflicts(["ep1-ba10.pt", "ep3-ba30.pt"], "ep{epoch}-ba{batch}.pt", Timestamp(epoch=2, batch=20))
        ['ep3-ba30.pt']
    """
    used = placeholders(filename)
    inside = [unit for unit in _UNITS_IN_EPOCH if unit in used]
    if inside and "epoch" not in used:
        raise ValueError(
            f"save_filename={filename!r} counts inside epochs with {{{inside[0]}}} but does not have {{epoch}}, so "
            f"that the order of the checkpoints is unknown. Add {{epoch}}, or pass save_overwrite=True."
        )
    pattern = _as_pattern(filename)
    now = {unit: int(getattr(timestamp, unit)) for unit in (*_COUNTERS, *_UNITS_IN_EPOCH)}
    conflicts: list[str] = []
    for name in names:
        if found := pattern.fullmatch(name):
            numbers = {unit: int(text) for unit, text in found.groupdict().items() if unit in now}
            same_epoch = numbers.get("epoch") == now["epoch"]
            if any(count > now[unit] for unit, count in numbers.items() if unit in _COUNTERS or same_epoch):
                conflicts.append(name)
    return conflicts


def numbers_in_name(name: str, filename: str) -> dict[str, int]:
    """Return the numbers in a name at the placeholders of a template; an empty dict if the name does not match.

    Example:
        >>> numbers_in_name("ep3-ba0030.pt", "ep{epoch}-ba{batch:04d}.pt")
        {'epoch': 3, 'batch': 30}
    """
    found = _as_pattern(filename).fullmatch(name)
    return {} if found is None else {unit: int(text) for unit, text in found.groupdict().items()}


def is_name_of(name: str, filename: str) -> bool:
    """Return whether a run with this template could have given a checkpoint this name.

    Example:
        >>> is_name_of("ep3-ba30.pt", "ep{epoch}-ba{batch}.pt"), is_name_of("notes.txt", "ep{epoch}-ba{batch}.pt")
        (True, False)
    """
    return _as_pattern(filename).fullmatch(name) is not None


def ensure_folder_has_no_conflicting_files(
    folder_name: str | os.PathLike[str], filename: str, timestamp: Timestamp
) -> None:
    """Raise if a folder holds checkpoints later than the run, which the run would replace.

    A run that starts from scratch in the folder of another run thus needs an explicit flag; a resumed run does not.

    Args:
        folder_name: The folder of checkpoints. It need not exist.
        filename: The template of their names.
        timestamp: The time of the run.

    Raises:
        CheckpointConflictError: If there are any, with their names; it is a `FileExistsError`.
        ValueError: If the template counts inside epochs without `{epoch}`.
    """
    folder = Path(folder_name)
    _refuse(str(folder), find_conflicts(_names_below(folder), filename, timestamp), timestamp)


def literal_prefix(template: str) -> str:
    """Return the literal text with which all names of a template begin.

    Example:
        >>> literal_prefix("run/ep{epoch}.pt")
        'run/ep'
    """
    literal, *_ = next(iter(Formatter().parse(template.lstrip("/"))), ("",))
    return literal


def _refuse(where: str, conflicts: list[str], timestamp: Timestamp) -> None:
    if conflicts:
        raise CheckpointConflictError(
            f"{where} holds {len(conflicts)} checkpoints that may conflict with a future checkpoint of the current "
            f"run, which is at epoch {int(timestamp.epoch)}, batch {int(timestamp.batch)}: "
            f"{first_few(sorted(conflicts), 5)}. Resume from them (autoresume=True or load_path), choose another "
            f"save_folder, or pass save_overwrite=True to replace them."
        )


def ensure_folder_is_empty(folder_name: str | os.PathLike[str]) -> None:
    """Raise if a folder holds any file, at any depth, except hidden files and files in hidden folders.

    Raises:
        CheckpointConflictError: If it does; it is a `FileExistsError`.
    """
    for root, folders, files in os.walk(folder_name):
        folders[:] = [name for name in folders if not name.startswith(".")]  # in place, so that `walk` skips the others
        for name in files:
            if not name.startswith("."):
                raise CheckpointConflictError(
                    f"{folder_name} is not empty: it holds {os.path.join(root, name)}. Choose another folder, or empty "
                    f"it."
                )


def _as_pattern(template: str) -> re.Pattern[str]:
    pattern = ""
    for literal, name, _, _ in Formatter().parse(template.lstrip("/")):
        pattern += re.escape(literal)
        if name in _NUMBERS:
            group = f"(?P<{name}>[0-9]+)"
            # A format width pads with zeros or spaces, on either side. A placeholder that occurs twice must have the
            # same value.
            pattern += f"(?P={name})" if group in pattern else f" *{group} *"
        elif name is not None:
            pattern += "[^/]+"
    return re.compile(pattern, re.DOTALL)


def _is_later(path: Path, timestamp: Timestamp) -> bool:
    counts = dict(zip(_COUNTERS, _candidate(path).counters or (), strict=False)) if path.exists() else {}
    return any(counts.get(unit, 0) > int(getattr(timestamp, unit)) for unit in ("batch", "epoch"))


def _names_below(folder: Path) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not is_unfinished(name)]  # in place, so that `walk` skips the others
        for name in (*folders, *files):
            if not is_unfinished(name):
                yield os.path.relpath(os.path.join(root, name), folder)


class HeldFolder:
    """Lock a folder while a run saves to it. Rank 0 holds the lock, and all ranks know whether it is held.

    The name of the folder may have `{run_name}` and the placeholders of ranks.
    """

    def __init__(self, folder: str) -> None:
        self.name = folder
        self._lock: FolderLock | None = None
        self.is_held = False

    def take(
        self,
        state: State,
        template: str | None = None,
        remote_template: str | None = None,
        *,
        link: PartialFilePath | None = None,
        store: ObjectStore | None = None,
    ) -> None:
        """Lock the folder, and remove leftovers of killed writers. Every rank must call this.

        Raise on all ranks if checkpoints whose names match a template are later than the state; without a template, all
        are allowed. With `template`, the target of the link must not be later either.
        """

        # Only rank 0 may change the folder, and an error on it must stop every rank.
        def take() -> None:
            folder = format_name_with_dist(self.name, state.run_name)
            if self._lock is None:
                self._lock = FolderLock(folder).acquire()
            try:
                # After locking, since another process could still be writing what looks like leftovers.
                remove_leftovers(folder, locked=True)
                pointer = None if link is None else Path(link.format(state))
                if pointer is not None:
                    refuse_folder(pointer)
                if template is not None:
                    ensure_folder_has_no_conflicting_files(folder, template, state.timestamp)
                    # Names under another template do not match, so a run over another one's is found by the link.
                    target = None if pointer is None else read_pointer(pointer)
                    if pointer is not None and target is not None and _is_later(target, state.timestamp):
                        _refuse(str(pointer.parent), [f"{target}, to which {pointer.name} leads"], state.timestamp)
                if store is not None and remote_template is not None:
                    prefix = literal_prefix(remote_template)
                    # If listing is not allowed, nothing is found here, and each upload checks its own name.
                    objects = list_if_allowed(store, prefix)
                    # Only complete folders count, not those that a killed writer has left.
                    names = {posixpath.dirname(name) for name in objects if posixpath.basename(name) in _MAKES_WHOLE}
                    conflicts = find_conflicts(sorted(names.union(objects)), remote_template, state.timestamp)
                    _refuse(store.get_uri(posixpath.dirname(prefix)), conflicts, state.timestamp)
            except BaseException:  # also an interrupt must not leave the folder locked
                self.give_back()
                raise

        Ranks().from_first(take)
        self.is_held = True

    def give_back(self) -> None:
        """Unlock the folder, if this run holds the lock."""
        self.is_held = False
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()
