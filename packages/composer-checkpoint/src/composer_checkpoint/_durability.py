"""Durable writes: flush and rename files and folders so that they survive a power failure."""

import ctypes
import errno
import json
import logging
import os
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from composer_checkpoint.errors import StorageError, as_storage_error
from composer_checkpoint.names import UNFINISHED

_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP}  # some network file systems cannot flush folders


def sync_tree(path: Path) -> None:
    """Flush a file, or all files and folders inside a folder, to disk.

    Each rank that writes into a shared folder must flush its own files: a node can only flush what was written on it.
    """
    if not path.is_dir():
        sync_path(path)
        return
    for root, _, names in os.walk(path, topdown=False):
        for name in names:
            sync_path(Path(root, name))
        sync_path(Path(root))


def sync_path(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:  # a symbolic link, whose target is flushed with its folder
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
    existing = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not existing.is_dir():
        raise StorageError(
            errno.ENOTDIR,
            f"{folder} cannot be made: {existing} is not a folder. Save to another folder, or move that file away",
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
        # An entry is durable only once the folder that holds it is flushed.
        sync_path(made.parent)


log = logging.getLogger(__name__)


def describe_set(finals: Mapping[Path, Path], folder: Path) -> str:
    """Return the content of the record: each file and its temporary name, relative to the folder, as JSON."""
    return json.dumps({os.path.relpath(final, folder): temporary.name for final, temporary in finals.items()})


def complete_set(record: Path) -> None:
    """Rename the temporary files of a record to their final names, and delete the record."""
    for final, unfinished in files_of_set(record).items():
        # A missing temporary file was renamed before the writer died.
        if unfinished.is_file():
            os.replace(unfinished, final)
            sync_path(final.parent)
            log.warning("Renamed a finished file to %s: its writer had stopped before it could do so.", final)
    # Deleted last: until all files have their names, another attempt needs the record.
    record.unlink()
    sync_path(record.parent)


def files_of_set(record: Path) -> dict[Path, Path]:
    """Return the temporary name of each file of a record, or none if any is not a temporary file below its folder."""
    try:
        names: dict[str, str] = json.loads(record.read_bytes())
        for name, temporary in names.items():
            path, found = PurePath(name), UNFINISHED.fullmatch(temporary)
            leads_out = path.is_absolute() or ".." in path.parts
            if leads_out or found is None or found["kind"] != "tmp" or not path.name.startswith(found["name"]):
                return {}
    except (FileNotFoundError, ValueError, AttributeError, TypeError):
        return {}
    return {record.parent / name: (record.parent / name).with_name(temporary) for name, temporary in names.items()}


def discard(path: Path) -> bool:
    """Delete a file or folder, and return whether it existed and is gone. Failures are logged."""
    try:
        if is_folder(path):
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        log.warning("%s could not be removed: %s", path, error)
        return False
    return True


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder, not a link to one."""
    return path.is_dir() and not path.is_symlink()


_AT_FDCWD, _NOREPLACE, _EXCHANGE = -100, 1, 2
# Returned by kernels and file systems that do not support the call or the flag.
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step, so that neither is ever missing."""
    return _renameat2(one, other, _EXCHANGE)


def rename_without_replacing(source: Path, target: Path) -> None:
    """Rename a file or folder unless the target exists."""
    if _renameat2(source, target, _NOREPLACE):
        return
    if not source.is_dir():
        try:
            os.link(source, target)  # atomic: fails if the target exists
        except OSError as error:
            if error.errno not in {errno.EPERM, *_UNSUPPORTED}:  # EPERM: the file system has no hard links
                raise
        else:
            os.unlink(source)
            return
    # Not atomic, so a second writer could come in between; this file system offers nothing better.
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    os.rename(source, target)


def _renameat2(one: Path, other: Path, flag: int) -> bool:
    # Missing on macOS, musl and glibc before 2.28.
    call = c_function("renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


@cache
def c_function(name: str, *argument_types: Any) -> Any:
    """Return a function of the C library, or `None` if it has none of this name."""
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if call is not None:
        call.argtypes = argument_types
    return call
