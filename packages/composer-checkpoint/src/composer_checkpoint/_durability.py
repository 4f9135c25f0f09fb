"""Flushing files and folders to the disk, so that they outlast a power cut."""

import errno
import os
from pathlib import Path

from composer_checkpoint._storage_faults import as_storage_error
from composer_checkpoint.errors import StorageError

__all__ = ["make_folders", "sync_path", "sync_tree"]

_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP}  # some network file systems do not flush folders


def sync_tree(path: Path) -> None:
    """Flush a file, or all files and folders of a folder, to the disk.

    Ranks on several nodes that write into one folder must each do this with their own files: a node flushes only what
    went through it.
    """
    if not path.is_dir():
        sync_path(path)
        return
    for root, _, names in os.walk(path, topdown=False):
        for name in names:
            sync_path(Path(root, name))
        sync_path(Path(root))


def sync_path(path: Path) -> None:
    """Flush one file, or one folder's list of names."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link: its text is flushed with its folder
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def make_folders(folder: Path) -> None:
    """Make a folder and those above it, durably.

    Raises:
        StorageError: If one of them is a file, or the file system refuses.
    """
    existing = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not existing.is_dir():
        raise StorageError(
            errno.ENOTDIR,
            f"{folder} cannot be made: {existing} is no folder. Save to another folder, or move that file away",
        )
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise as_storage_error(error, folder) or StorageError(
            error.errno,
            f"{folder} cannot be made: {error.strerror or error}. The file system of {existing} does not take new "
            f"folders. Save to another folder",
        ) from error
    for made in reversed(missing):
        sync_path(made.parent)
