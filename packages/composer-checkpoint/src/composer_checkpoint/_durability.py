"""Flushing files and folders to the disk, so that they outlast a power cut."""

import ctypes
import errno
import json
import logging
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from composer_checkpoint.errors import StorageError, as_storage_error
from composer_checkpoint.names import UNFINISHED

__all__ = [
    "make_folders",
    "sync_path",
    "sync_tree",
    "complete_set",
    "describe_set",
    "finals_of",
    "temporaries_of",
    "exchange",
    "rename_without_replacing",
]

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


log = logging.getLogger(__name__)


def describe_set(finals: Mapping[Path, Path], folder: Path) -> str:
    """Return the content of the record: each file's name and its temporary one, both counted from the folder."""
    return json.dumps({os.path.relpath(final, folder): temporary.name for final, temporary in finals.items()})


def finals_of(record: Path) -> set[Path]:
    """Return the files whose names a record gives."""
    return {record.parent / name for name in _read(record)}


def temporaries_of(record: Path) -> set[Path]:
    """Return the temporary files that a record names."""
    return {(record.parent / name).with_name(temporary) for name, temporary in _read(record).items()}


def complete_set(record: Path) -> None:
    """Give the files of a record their names, as far as they do not have them, and delete the record.

    Raises:
        OSError: If the file system refuses; the record stays for the next attempt.
    """
    folder = record.parent
    for name, temporary in _read(record).items():
        final = folder / name
        unfinished = final.with_name(temporary)
        if unfinished.is_file():
            os.replace(unfinished, final)
            sync_path(final.parent)
            log.warning("Gave %s its name: a writer that is gone had written it, and not come to renaming it.", final)
    record.unlink()
    sync_path(folder)


def _read(record: Path) -> dict[str, str]:
    """Return what a record says, or nothing if it is none: it must not rename what is elsewhere or no temporary."""
    try:
        names: Any = json.loads(record.read_bytes())
        sound = all(_is_sound(name, temporary) for name, temporary in names.items())
    except (FileNotFoundError, ValueError, AttributeError, TypeError):
        return {}
    return names if sound else {}


def _is_sound(name: str, temporary: str) -> bool:
    path = PurePath(name)
    leads_out = path.is_absolute() or ".." in path.parts
    found = UNFINISHED.fullmatch(temporary)
    return not leads_out and found is not None and found["kind"] == "tmp" and path.name.startswith(found["name"])


_AT_FDCWD, _NOREPLACE, _EXCHANGE = -100, 1, 2
# What kernels and file systems answer that do not know the call or the flag.
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def exchange(one: Path, other: Path) -> bool:
    """Let two names change places in one step, so that neither is ever missing.

    Returns:
        Whether that was done. `False` where the system or the file system cannot.

    Raises:
        OSError: If it can and something else is wrong, such as a missing file.
    """
    return _renameat2(one, other, _EXCHANGE)


def rename_without_replacing(source: Path, target: Path) -> None:
    """Rename a file or folder unless the target exists.

    Raises:
        FileExistsError: If it does.
    """
    if _renameat2(source, target, _NOREPLACE):
        return
    if not source.is_dir():
        try:
            os.link(source, target)  # fails where the target exists, in one step
        except OSError as error:
            if error.errno not in {errno.EPERM, *_UNSUPPORTED}:  # EPERM: a file system without hard links
                raise
        else:
            os.unlink(source)
            return
    # Two steps, so that a second writer could come between them; this file system offers nothing better.
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    os.rename(source, target)


def _renameat2(one: Path, other: Path, flag: int) -> bool:
    call = _find_renameat2()
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


@cache
def _find_renameat2() -> Any:
    """Return the C library's function, or None where it has none (macOS, musl, glibc before 2.28)."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return call
