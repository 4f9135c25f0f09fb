"""Locks for folders of checkpoints, and removal of what killed writers left in them."""

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from composer_checkpoint._durability import (
    complete_set,
    finals_of,
    make_folders,
    rename_without_replacing,
    temporaries_of,
)
from composer_checkpoint.errors import StorageError, as_storage_error
from composer_checkpoint.names import UNFINISHED, WRITER_PATTERN, is_alive, this_writer

__all__ = ["LOCK_NAME", "FolderInUseError", "FolderLock"]

LOCK_NAME = ".composer-checkpoint.lock"
_BUSY = {errno.EACCES, errno.EAGAIN}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


class FolderInUseError(StorageError):
    """Another process is saving checkpoints to the folder."""


class FolderLock:
    """Keep other processes from saving to a folder while this one does.

    The lock is the operating system's, on a hidden file in the folder that names its owner. It ends with the process in
    any case, and is not inherited by forks; the next owner logs a warning. It holds between machines if the file system
    supports such locks (NFS 4, Lustre with `flock`, ...). If not, the file itself is the lock: the file of a dead
    process of this machine is taken over, that of another machine must be deleted by hand.

    Within one process, any number of objects may hold the lock of a folder, so that two savers can share it.

    Args:
        folder: The folder, which is created if it does not exist.
        timeout_s: How long to wait for another process before giving up.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, FolderLock(folder) as lock:
        ...     lock.held
        True
    """

    def __init__(self, folder: str | os.PathLike[str], *, timeout_s: float = 0.0) -> None:
        self.folder = Path(os.path.abspath(folder))
        self.timeout_s = timeout_s
        self._hold: _Hold | None = None

    @property
    def held(self) -> bool:
        """Return whether this object holds the lock."""
        return self._hold is not None and self._hold.pid == os.getpid()

    def acquire(self) -> "FolderLock":
        """Take the lock.

        Returns:
            This object.

        Raises:
            FolderInUseError: If another process still holds it after `timeout_s`, with that process's host and number.
            StorageError: If the folder cannot be written to.
            RuntimeError: If this object already holds it.
        """
        if self.held:
            raise RuntimeError(f"This lock of {self.folder} is held already. Release it first, or make a second one.")
        deadline, pause_s = time.monotonic() + self.timeout_s, _FIRST_PAUSE_S
        while True:
            try:
                self._hold = _take(self.folder)
                return self
            except FolderInUseError:
                if time.monotonic() >= deadline:
                    raise
            except OSError as error:
                raise as_storage_error(error, self.folder / LOCK_NAME) or error from error
            time.sleep(pause_s)
            # Backs off, since each attempt opens and locks a file, perhaps over a network.
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self.held and self._hold is not None:
            _give_back(self._hold)
        self._hold = None

    def __enter__(self) -> "FolderLock":
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class _Hold:
    """The lock of a folder in this process, with the number of objects that share it."""

    def __init__(self, path: Path, descriptor: int, key: tuple[int, int]) -> None:
        self.path, self.descriptor, self.key = path, descriptor, key
        self.pid, self.holders = os.getpid(), 1


# POSIX record locks belong to the process, and closing any descriptor of the file releases them. So each process opens
# the file of a folder once and counts its holders.
_holds: dict[tuple[int, int], _Hold] = {}
_guard = threading.Lock()


def _take(folder: Path) -> _Hold:
    make_folders(folder)
    status = folder.stat()
    key = (status.st_dev, status.st_ino)
    with _guard:
        hold = _holds.get(key)
        # With another pid it was inherited by a fork, which does not hold the lock.
        if hold is not None and hold.pid == os.getpid():
            hold.holders += 1
            return hold
        descriptor, path = _lock_file(folder / LOCK_NAME)
        hold = _holds[key] = _Hold(path, descriptor, key)
        return hold


def _give_back(hold: _Hold) -> None:
    with _guard:
        hold.holders -= 1
        if hold.holders:
            return
        _holds.pop(hold.key, None)
        # Removed while still locked: a waiting process sees that its file has lost the name, and opens the new one.
        with suppress(OSError):
            hold.path.unlink()
        os.close(hold.descriptor)


def _lock_file(path: Path) -> tuple[int, Path]:
    """Return a descriptor of the locked file, signed by this process, and its path."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _read(descriptor)
            os.close(descriptor)
            if error.errno in _BUSY:
                raise _in_use(path, owner) from error
            if error.errno in _NO_LOCKS:
                path.unlink(missing_ok=True)
                return _take_by_name(path.with_suffix(".owner"))
            raise
        if _still_has_name(descriptor, path):
            _sign(descriptor, path)
            return descriptor, path
        os.close(descriptor)  # its owner released it before it was locked here, so there is a new file


def _sign(descriptor: int, path: Path) -> None:
    """Write this process's name into the file, and log the name that was in it."""
    try:
        _say_who_had_it(path, _read(descriptor))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _record(), 0)
    except BaseException:  # such as a full disk
        os.close(descriptor)
        raise


def _take_by_name(path: Path) -> tuple[int, Path]:
    """Take the lock by creating a file, where the file system has no locks."""
    own = path.with_name(f"{path.name}.{this_writer()}")
    own.write_bytes(_record())
    try:
        while True:
            try:
                os.link(own, path)  # atomic: fails if the file exists, and never shows it without content
            except FileExistsError:
                _take_from_the_dead(path, own)
            else:
                return os.open(path, os.O_RDWR), path
    finally:
        own.unlink(missing_ok=True)


def _take_from_the_dead(path: Path, own: Path) -> None:
    owner = _read_path(path)
    if owner and is_alive(owner["writer"]) is not False:
        raise _in_use(path, owner)
    # Renamed before the check, so that only one of several waiting processes removes it.
    stale = own.with_name(f"{own.name}.stale")
    with suppress(FileNotFoundError):
        os.rename(path, stale)
        if _read_path(stale) != owner:  # another process was faster, and this is its file
            os.link(stale, path)
        else:
            _say_who_had_it(path, owner)
        stale.unlink()


def _still_has_name(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _record() -> bytes:
    record = {"writer": this_writer(), "host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
    return json.dumps(record).encode()


def _read(descriptor: int) -> dict[str, Any]:
    try:
        record = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    named = isinstance(record, dict) and re.fullmatch(WRITER_PATTERN, str(record.get("writer")))
    return record if named else {}


def _read_path(path: Path) -> dict[str, Any]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return {}
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _say_who_had_it(path: Path, owner: dict[str, Any]) -> None:
    if owner:
        log.warning(
            "Took over the lock of %s from process %s on %s, which ended without giving it back.",
            path.parent,
            owner.get("pid"),
            owner.get("host"),
        )


def _in_use(path: Path, owner: dict[str, Any]) -> FolderInUseError:
    who = f"process {owner.get('pid')} on {owner.get('host')}" if owner else "another process"
    return FolderInUseError(
        f"{path.parent} is in use: {who} is saving checkpoints there. Give each run a folder of its own, or wait until "
        f"that process has ended. If it is gone for certain, delete {path}."
    )


log = logging.getLogger(__name__)


def complete_interrupted_sets(folder: str | os.PathLike[str]) -> None:
    """Rename completely written per-rank files that a killed run left unnamed. Called on one rank.

    Does nothing while another run saves to the folder.
    """
    if not any(found["kind"] == "set" for _, found in _unfinished_in(folder)):
        return
    try:
        with FolderLock(folder):
            complete_sets(folder, locked=True)
    except OSError as error:  # in use or read-only: the previous set of files is still valid
        log.warning("Per-rank files in %s that are not yet renamed are left alone: %s", folder, error)


def remove_leftovers(folder: str | os.PathLike[str], *, locked: bool = False) -> list[Path]:
    """Delete what killed writers left in a folder.

    Files of a living process of this machine stay. A folder that was being replaced where the file system cannot swap
    names gets its name back. Per-rank files that are completely written are renamed.

    Args:
        folder: The folder of checkpoints. Folders below it are searched too.
        locked: Whether the caller holds the `FolderLock`, so that writers on other machines, and from before a reboot,
            must be dead. If not, their files stay.

    Returns:
        The deleted paths.
    """
    complete_sets(folder, locked=locked)
    return _remove(_left_in(folder, locked))


def remove_leftovers_of(path: str | os.PathLike[str]) -> list[Path]:
    """Delete what killed writers of one file or folder left next to it.

    Files of a living process stay, as do files from another machine and files of a multi-file commit.
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
    """Return what `remove_leftovers` would delete, rename or restore, without changing anything."""
    return [*_left_sets(folder, locked), *(path for path, _ in _left_in(folder, locked))]


def complete_sets(folder: str | os.PathLike[str], *, locked: bool = False) -> None:
    """Rename per-rank files that were completely written when their writers were killed."""
    for path in _left_sets(folder, locked):
        complete_set(path)


def complete_earlier_sets(folder: Path, finals: Set[Path]) -> None:
    """Rename files that earlier saves left under temporary names, including saves of this process."""
    for path in sorted(folder.iterdir()):
        found = UNFINISHED.fullmatch(path.name)
        if found is None or found["kind"] != "set" or not finals & finals_of(path):
            continue
        if found["writer"] == this_writer() or not is_alive(found["writer"]):
            complete_set(path)


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
        log.warning("%s is left behind and could not be removed: %s", path, error)
        return False
    return True


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder itself, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def _unfinished_in(folder: str | os.PathLike[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    pending = [Path(folder)]
    while pending:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                found = UNFINISHED.fullmatch(entry.name)
                if found is not None:
                    yield Path(entry), found
                elif entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry))


def _left_sets(folder: str | os.PathLike[str], locked: bool) -> list[Path]:
    found_sets = [(path, found) for path, found in _unfinished_in(folder) if found["kind"] == "set"]
    return [path for path, found in found_sets if not _may_be_writing(found["writer"], locked)]


def _left_in(folder: str | os.PathLike[str], locked: bool) -> list[tuple[Path, re.Match[str]]]:
    left = list(_unfinished_in(folder))
    # The temporary files of a record are still needed if its writer may be alive.
    needed = {temporary for path, found in left if found["kind"] == "set" for temporary in temporaries_of(path)}
    return [
        (path, found)
        for path, found in left
        if found["kind"] != "set" and path not in needed and not _may_be_writing(found["writer"], locked)
    ]


def _remove(left: list[tuple[Path, re.Match[str]]]) -> list[Path]:
    removed: list[Path] = []
    for path, found in left:
        home = path.with_name(found["name"])
        # The writer had moved the old folder aside, and died before its replacement had the name.
        if found["kind"] == "old" and not os.path.lexists(home):
            with suppress(FileExistsError):
                rename_without_replacing(path, home)
                log.warning("Put %s back: its writer was killed while replacing it.", home)
                continue
        if discard(path):
            removed.append(path)
            log.warning("Removed %s, which a killed writer had left unfinished.", path)
    return removed


def _home(name: str) -> str:
    """Return the final name of an unfinished file; a writer may have written next to another temporary name."""
    found = UNFINISHED.fullmatch(name)
    return name if found is None else _home(found["name"])


def _has_record(writer: str, final: Path) -> bool:
    """Return whether a writer left a record in this folder or above, which may list this file."""
    for folder in final.parents:
        with suppress(OSError), os.scandir(folder) as entries:
            names = (UNFINISHED.fullmatch(entry.name) for entry in entries)
            if any(found is not None and (found["kind"], found["writer"]) == ("set", writer) for found in names):
                return True
    return False


def _may_be_writing(writer: str, locked: bool) -> bool:
    alive = is_alive(writer)
    return not locked if alive is None else alive
