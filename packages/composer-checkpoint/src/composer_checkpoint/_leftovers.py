"""What is being written, and what writers that were killed have left."""

import logging
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from composer_checkpoint._renames import rename_without_replacing
from composer_checkpoint._writers import WRITER_PATTERN, is_alive, this_writer

__all__ = ["discard", "is_folder", "is_unfinished", "name_beside", "remove_leftovers"]

log = logging.getLogger(__name__)

# .tmp-: not finished, or already replaced; never read. .old-: a whole folder, moved aside for an instant where the
# file system cannot swap two names; put back if its writer died in that instant.
_LEFTOVER = re.compile(rf"(?P<name>.+)\.(?P<kind>tmp|old)-(?P<writer>{WRITER_PATTERN})-[0-9a-f]{{8}}", re.DOTALL)
_LONGEST_NAME_BYTES = 255


def name_beside(final: Path, kind: str = "tmp") -> Path:
    """Return a path in the same folder that nobody else uses and that says who writes it."""
    mark = f".{kind}-{this_writer()}-{secrets.token_hex(4)}"
    kept = os.fsencode(final.name)[: _LONGEST_NAME_BYTES - len(mark)]
    return final.with_name(kept.decode(errors="ignore") + mark)


def is_unfinished(name: str) -> bool:
    """Return whether a file or folder of this name is not yet, or no longer, a checkpoint."""
    found = _LEFTOVER.fullmatch(name)
    return found is not None and found["kind"] == "tmp"


def remove_leftovers(folder: str | os.PathLike[str], *, locked: bool = False) -> list[Path]:
    """Delete what writers left in a folder when they were killed.

    What a living process of this machine is writing stays. A folder that was just being replaced where the file
    system cannot swap names gets its name back.

    Args:
        folder: Where checkpoints are. Folders below it are looked through too.
        locked: Whether the caller holds the `FolderLock`, so that writers on other machines, and before a reboot of
            this one, are known to be gone. Otherwise what they left stays.

    Returns:
        What was deleted.
    """
    removed: list[Path] = []
    pending = [Path(folder)]
    while pending:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                found = _LEFTOVER.fullmatch(entry.name)
                if found is None:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(Path(entry))
                elif not _may_be_writing(found["writer"], locked):
                    _tidy(Path(entry), found["kind"], found["name"], removed)
    for path in removed:
        log.warning("Removed %s, which a writer that is gone had left unfinished.", path)
    return removed


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
