"""Checkpoints in the folder that a run would come upon later."""

import os
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING

from composer_checkpoint._unfinished_names import is_unfinished
from composer_checkpoint.discover import is_later
from composer_checkpoint.errors import CheckpointConflictError
from composer_checkpoint.manifest import MANIFEST_NAME
from composer_checkpoint.names import placeholders
from composer_checkpoint.pointers import read_pointer
from composer_checkpoint.stores.opening import list_if_allowed

if TYPE_CHECKING:
    from composer_checkpoint.stores.base import ObjectStore
    from composer_time import Timestamp

__all__ = [
    "ensure_folder_has_no_conflicting_files",
    "ensure_folder_is_empty",
    "ensure_link_leads_to_no_later_one",
    "ensure_store_has_no_conflicting_objects",
    "find_conflicts",
    "is_name_of",
    "literal_prefix",
    "numbers_in_name",
    "whole_names",
]

_MAKES_WHOLE = (MANIFEST_NAME, ".metadata")
_UNITS = ("iteration", "epoch", "batch", "sample", "token")
_UNITS_IN_EPOCH = ("batch_in_epoch", "sample_in_epoch", "token_in_epoch")
_NUMBERS = {*_UNITS, *_UNITS_IN_EPOCH, "rank", "local_rank", "world_size", "local_world_size", "node_rank"}


def find_conflicts(names: Iterable[str], filename: str, timestamp: "Timestamp") -> list[str]:
    """Return the names that a run at this time would give to a checkpoint it has yet to save.

    A name counts if it matches the template and any of its numbers is later than the timestamp's; numbers inside an
    epoch count only within the same epoch.

    Args:
        names: Paths of files and folders, relative to where checkpoints are saved.
        filename: The template, such as `'ep{epoch}-ba{batch}.pt'`.
        timestamp: How far the run has come.

    Raises:
        ValueError: If the template counts inside epochs without `{epoch}`, so that names cannot be told apart.

    Example:
        >>> from composer_time import Timestamp
        >>> find_conflicts(["ep1-ba10.pt", "ep3-ba30.pt"], "ep{epoch}-ba{batch}.pt", Timestamp(epoch=2, batch=20))
        ['ep3-ba30.pt']
    """
    used = placeholders(filename)
    inside = [unit for unit in _UNITS_IN_EPOCH if unit in used]
    if inside and "epoch" not in used:
        raise ValueError(
            f"save_filename={filename!r} counts inside epochs with {{{inside[0]}}} but does not have {{epoch}}, so it "
            f"cannot be told which checkpoints are later. Add {{epoch}}, or pass save_overwrite=True."
        )
    pattern = re.compile(_as_pattern(filename.lstrip("/")), re.DOTALL)
    now = {unit: int(getattr(timestamp, unit)) for unit in (*_UNITS, *_UNITS_IN_EPOCH)}
    matches = ((name, pattern.fullmatch(name)) for name in names)
    return [name for name, found in matches if found and _is_later(found.groupdict(), now)]


def numbers_in_name(name: str, filename: str) -> dict[str, int]:
    """Return the numbers that a name has where a template has placeholders; none if the name does not match.

    Args:
        name: A path relative to where checkpoints are saved.
        filename: The template.

    Example:
        >>> numbers_in_name("ep3-ba0030.pt", "ep{epoch}-ba{batch:04d}.pt")
        {'epoch': 3, 'batch': 30}
    """
    found = _match(name, filename)
    return {} if found is None else {unit: int(text) for unit, text in found.groupdict().items()}


def is_name_of(name: str, filename: str) -> bool:
    """Return whether a run that names its checkpoints by a template could have given one this name.

    Example:
        >>> is_name_of("ep3-ba30.pt", "ep{epoch}-ba{batch}.pt"), is_name_of("notes.txt", "ep{epoch}-ba{batch}.pt")
        (True, False)
    """
    return _match(name, filename) is not None


def _match(name: str, filename: str) -> re.Match[str] | None:
    return re.fullmatch(_as_pattern(filename.lstrip("/")), name, re.DOTALL)


def ensure_folder_has_no_conflicting_files(
    folder_name: str | os.PathLike[str], filename: str, timestamp: "Timestamp"
) -> None:
    """Raise if the folder holds checkpoints that are later than the run is: it would replace them one by one.

    So a run that starts from zero over the checkpoints of another needs an explicit flag, and one that resumes does
    not.

    Args:
        folder_name: Where checkpoints are saved. It need not exist.
        filename: The template of their names.
        timestamp: How far the run has come.

    Raises:
        CheckpointConflictError: If there are any, with their names; it is a `FileExistsError`.
        ValueError: If the template counts inside epochs without `{epoch}`.
    """
    folder = Path(folder_name)
    _refuse(str(folder), find_conflicts(_names_below(folder), filename, timestamp), timestamp)


def ensure_link_leads_to_no_later_one(link: str | os.PathLike[str], timestamp: "Timestamp") -> None:
    """Raise if the link to the latest checkpoint leads to one that is later than the run is: it would lead back.

    So a run that starts from zero over the checkpoints of another needs an explicit flag also where it calls its own
    by other names.

    Raises:
        CheckpointConflictError: If so; it is a `FileExistsError`.
    """
    target = read_pointer(link)
    if target is not None and target.exists() and is_later(target, timestamp):
        _refuse(str(Path(link).parent), [f"{target}, to which {Path(link).name} leads"], timestamp)


def ensure_store_has_no_conflicting_objects(store: "ObjectStore", filename: str, timestamp: "Timestamp") -> None:
    """Raise if a store holds checkpoints that are later than the run is, as the function above does for a folder.

    Folders count if they are whole: what a killed writer has left of one is in nobody's way. A store that cannot list
    what it has, or must not list it for these credentials, is not looked through; there each upload looks for its own
    name.

    Args:
        store: Where checkpoints are saved.
        filename: The template of their names in the store, with the run's name filled in.
        timestamp: How far the run has come.

    Raises:
        CheckpointConflictError: If there are any, with their names; it is a `FileExistsError`.
        StorageError: If the store cannot be asked.
        ValueError: If the template counts inside epochs without `{epoch}`.
    """
    names = whole_names(list_if_allowed(store, literal_prefix(filename)))
    where = store.get_uri(posixpath.dirname(literal_prefix(filename)))
    _refuse(where, find_conflicts(names, filename.lstrip("/"), timestamp), timestamp)


def whole_names(objects: Iterable[str]) -> list[str]:
    """Return the names of what may be checkpoints among a store's objects: each object, and each folder that is whole.

    Example:
        >>> whole_names(["run/ep1/.metadata", "run/ep1/__0_0.distcp", "run/ep2/__0_0.distcp"])
        ['run/ep1', 'run/ep1/.metadata', 'run/ep1/__0_0.distcp', 'run/ep2/__0_0.distcp']
    """
    objects = list(objects)
    folders = {posixpath.dirname(name) for name in objects if posixpath.basename(name) in _MAKES_WHOLE}
    return sorted(folders.union(objects))


def literal_prefix(template: str) -> str:
    """Return what all names of a template begin with.

    Example:
        >>> literal_prefix("run/ep{epoch}.pt")
        'run/ep'
    """
    literal, *_ = next(iter(Formatter().parse(template.lstrip("/"))), ("",))
    return literal


def _refuse(where: str, conflicts: list[str], timestamp: "Timestamp") -> None:
    if conflicts:
        shown = ", ".join(sorted(conflicts)[:5]) + (", ..." if len(conflicts) > 5 else "")
        raise CheckpointConflictError(
            f"{where} holds {len(conflicts)} checkpoints that may conflict with a future checkpoint of the current "
            f"run, which is at epoch {int(timestamp.epoch)}, batch {int(timestamp.batch)}: {shown}. Resume from them "
            f"(autoresume=True or load_path), choose another save_folder, or pass save_overwrite=True to replace them."
        )


def ensure_folder_is_empty(folder_name: str | os.PathLike[str]) -> None:
    """Raise if there is any file in a folder or below it, except hidden ones and those in hidden folders.

    Raises:
        CheckpointConflictError: If so; it is a `FileExistsError`.
    """
    for root, folders, files in os.walk(folder_name):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith("."):
                raise CheckpointConflictError(
                    f"{folder_name} is not empty: it holds {os.path.join(root, name)}. Choose another folder, or empty "
                    f"it."
                )


def _as_pattern(template: str) -> str:
    parts: list[str] = []
    seen: set[str] = set()
    for literal, name, _, _ in Formatter().parse(template):
        parts.append(re.escape(literal))
        if name is None:
            continue
        text = "[0-9]+" if name in _NUMBERS else "[^/]+"
        if name in seen:
            parts.append(f"(?P={name})")
        elif name in _NUMBERS:
            # A width pads with zeros or blanks, on either side.
            parts.append(f" *(?P<{name}>{text}) *")
            seen.add(name)
        else:
            parts.append(text)
    return "".join(parts)


def _is_later(numbers: dict[str, str], now: dict[str, int]) -> bool:
    found = {unit: int(text) for unit, text in numbers.items() if unit in now}
    same_epoch = found.get("epoch") == now["epoch"]
    return any(count > now[unit] for unit, count in found.items() if unit in _UNITS or same_epoch)


def _names_below(folder: Path) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not is_unfinished(name)]
        for name in (*folders, *files):
            if not is_unfinished(name):
                yield os.path.relpath(os.path.join(root, name), folder)
