"""What writers that were killed have left."""

import logging
import os
import re
import shutil
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path

from composer_checkpoint._file_sets import complete_set, finals_of, temporaries_of
from composer_checkpoint._renames import rename_without_replacing
from composer_checkpoint._unfinished_names import UNFINISHED
from composer_checkpoint._writers import is_alive, this_writer

__all__ = [
    "complete_earlier_sets",
    "complete_sets",
    "discard",
    "find_leftovers",
    "has_sets",
    "is_folder",
    "remove_leftovers",
    "remove_leftovers_of",
]

log = logging.getLogger(__name__)


def remove_leftovers(folder: str | os.PathLike[str], *, locked: bool = False) -> list[Path]:
    """Delete what writers left in a folder when they were killed.

    What a living process of this machine is writing stays. A folder that was just being replaced where the file
    system cannot swap names gets its name back. Per-rank files of which all are written, and some not yet renamed,
    get their names.

    Args:
        folder: Where checkpoints are. Folders below it are looked through too.
        locked: Whether the caller holds the `FolderLock`, so that writers on other machines, and before a reboot of
            this one, are known to be gone. Otherwise what they left stays.

    Returns:
        What was deleted.
    """
    complete_sets(folder, locked=locked)
    return _remove(_left_in(folder, locked))


def remove_leftovers_of(path: str | os.PathLike[str]) -> list[Path]:
    """Delete what writers of one file or folder left beside it when they were killed.

    What a living process is writing stays, and so does what was written on another machine, or is one of several files
    that get their names together.

    Args:
        path: The real name that it was to get.

    Returns:
        What was deleted.
    """
    final = Path(os.path.abspath(path))
    left: list[tuple[Path, re.Match[str]]] = []
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(final.parent) as entries:
        for entry in entries:
            found = UNFINISHED.fullmatch(entry.name)
            if found is None or found["kind"] == "set" or _home(entry.name) != final.name:
                continue
            if is_alive(found["writer"]) is False and not _has_record(found["writer"], final):
                left.append((Path(entry), found))
    return _remove(left)


def find_leftovers(folder: str | os.PathLike[str], *, locked: bool = False) -> list[Path]:
    """Return what `remove_leftovers` would delete, rename or put back, and change nothing."""
    sets = [
        path
        for path, found in _unfinished_in(folder)
        if found["kind"] == "set" and not _may_be_writing(found["writer"], locked)
    ]
    return [*sets, *(path for path, _ in _left_in(folder, locked))]


def complete_sets(folder: str | os.PathLike[str], *, locked: bool = False) -> None:
    """Rename what is left of per-rank files, all of which were written when their writers were killed.

    Args:
        folder: Where checkpoints are.
        locked: As in `remove_leftovers`.

    Raises:
        OSError: If the file system refuses.
    """
    for path, found in list(_unfinished_in(folder)):
        if found["kind"] == "set" and not _may_be_writing(found["writer"], locked):
            complete_set(path)


def has_sets(folder: str | os.PathLike[str]) -> bool:
    """Return whether any writer of per-rank files has not come to the end of renaming them."""
    return any(found["kind"] == "set" for _, found in _unfinished_in(folder))


def complete_earlier_sets(folder: Path, finals: Set[Path]) -> None:
    """Rename what earlier saves have left of the files that are about to be replaced, this process's saves included.

    Args:
        folder: Where the records are.
        finals: The files.

    Raises:
        OSError: If the file system refuses.
    """
    for path in sorted(folder.iterdir()):
        found = UNFINISHED.fullmatch(path.name)
        if found is None or found["kind"] != "set" or not finals & finals_of(path):
            continue
        if found["writer"] == this_writer() or not is_alive(found["writer"]):
            complete_set(path)


def discard(path: Path) -> bool:
    """Delete whatever has this name, and return whether anything had and it is gone. Failures are logged."""
    try:
        if is_folder(path):
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        log.warning("%s is left behind and could not be removed: %s", path, error)
        return False
    return True


def is_folder(path: Path) -> bool:
    """Return whether the name is that of a folder itself, not of a link to one."""
    return path.is_dir() and not path.is_symlink()


def _unfinished_in(folder: str | os.PathLike[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    """Go through the unfinished files and folders of a folder and of those below it."""
    pending = [Path(folder)]
    while pending:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                found = UNFINISHED.fullmatch(entry.name)
                if found is not None:
                    yield Path(entry), found
                elif entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry))


def _left_in(folder: str | os.PathLike[str], locked: bool) -> list[tuple[Path, re.Match[str]]]:
    left = list(_unfinished_in(folder))
    # Where it cannot be known whether the writer of a record is gone, the files that it names are still needed.
    needed = {temporary for path, found in left if found["kind"] == "set" for temporary in temporaries_of(path)}
    return [
        (path, found)
        for path, found in left
        if found["kind"] != "set" and path not in needed and not _may_be_writing(found["writer"], locked)
    ]


def _remove(left: list[tuple[Path, re.Match[str]]]) -> list[Path]:
    removed: list[Path] = []
    for path, found in left:
        _tidy(path, found["kind"], found["name"], removed)
    for path in removed:
        log.warning("Removed %s, which a writer that is gone had left unfinished.", path)
    return removed


def _home(name: str) -> str:
    """Return the real name of what is unfinished; a writer may have written beside another one's temporary name."""
    found = UNFINISHED.fullmatch(name)
    return name if found is None else _home(found["name"])


def _has_record(writer: str, final: Path) -> bool:
    """Return whether a writer left a record of files, of which this may be one; it lies here or somewhere above."""
    for folder in final.parents:
        with suppress(OSError), os.scandir(folder) as entries:
            names = (UNFINISHED.fullmatch(entry.name) for entry in entries)
            if any(found is not None and (found["kind"], found["writer"]) == ("set", writer) for found in names):
                return True
    return False


def _may_be_writing(writer: str, locked: bool) -> bool:
    alive = is_alive(writer)
    return not locked if alive is None else alive


def _tidy(path: Path, kind: str, name: str, removed: list[Path]) -> None:
    home = path.with_name(name)
    if kind == "old" and not os.path.lexists(home):
        with suppress(FileExistsError):
            rename_without_replacing(path, home)
            log.warning("Put %s back: its writer was killed while replacing it.", home)
            return
    if discard(path):
        removed.append(path)
