"""Locks for folders of checkpoints, and removal of the leftovers of killed writers."""

import errno
import fcntl
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_checkpoint import _durability as durability
from composer_checkpoint.errors import StorageError, as_storage_error
from composer_checkpoint.names import UNFINISHED, WRITER_PATTERN, is_alive, this_writer

LOCK_NAME = ".composer-checkpoint.lock"
_BUSY = {errno.EACCES, errno.EAGAIN}  # POSIX allows either for a lock that another process holds
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


class FolderInUseError(StorageError):
    """Another process is saving checkpoints to the folder."""


class FolderLock:
    """Keep other processes from saving to a folder while this one does.

    The lock is a POSIX record lock on a hidden file in the folder, which names its owner. It ends with the process, and
    forks do not inherit it. If the owner was killed, the next owner logs a warning. The lock works between machines if
    the file system supports it (NFS 4, Lustre with `flock`, ...). If not, the existence of the file is the lock: the
    file of a dead process of this machine is taken over, and that of another machine must be deleted by hand.

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
            FolderInUseError: If another process still holds it after `timeout_s`, with the host and ID of that process.
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
            # Exponential, since each attempt opens and locks a file, possibly over a network.
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self.held and self._hold is not None:
            _give_back(self._hold)
        self._hold = None

    def __enter__(self) -> "FolderLock":
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(slots=True)
class _Hold:
    """The lock of a folder in this process, with the number of objects that share it."""

    path: Path
    descriptor: int
    key: tuple[int, int]
    pid: int = field(default_factory=os.getpid)
    holders: int = 1


# POSIX record locks belong to the process, and closing any descriptor of the file releases them. So each process opens
# the file of a folder once and counts its holders.
_holds: dict[tuple[int, int], _Hold] = {}
_guard = threading.Lock()


def _take(folder: Path) -> _Hold:
    durability.make_folders(folder)
    status = folder.stat()
    key = (status.st_dev, status.st_ino)  # not the path, since several paths may lead to the folder
    with _guard:
        hold = _holds.get(key)
        # An entry with another process ID was inherited by a fork, which does not hold the lock.
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
        # Removed before unlocking, so that a process that has opened the file finds the name gone, and opens a new one.
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
            owner = _parse(os.pread(descriptor, 4096, 0))
            os.close(descriptor)
            if error.errno in _BUSY:
                raise _in_use(path, owner) from error
            if error.errno in _NO_LOCKS:
                path.unlink(missing_ok=True)
                return _take_by_name(path.with_suffix(".owner"))
            raise
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                _sign(descriptor, path)
                return descriptor, path
        os.close(descriptor)  # the owner removed the file after it was opened here, so a new file must be locked


def _sign(descriptor: int, path: Path) -> None:
    """Write this process's ID into the file, and log the ID in it, which a killed owner has left."""
    try:
        _say_who_had_it(path, _parse(os.pread(descriptor, 4096, 0)))
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
    # Renamed before the check, so that only one of several waiting processes takes it over.
    stale = own.with_name(f"{own.name}.stale")
    with suppress(FileNotFoundError):
        os.rename(path, stale)
        if _read_path(stale) != owner:  # another process took it over first, so its file is put back
            os.link(stale, path)
        else:
            _say_who_had_it(path, owner)
        stale.unlink()


def _record() -> bytes:
    record = {"writer": this_writer(), "host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
    return json.dumps(record).encode()


def _parse(text: bytes) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except ValueError:
        return {}
    named = isinstance(record, dict) and re.fullmatch(WRITER_PATTERN, str(record.get("writer")))
    return record if named else {}


def _read_path(path: Path) -> dict[str, Any]:
    try:
        return _parse(path.read_bytes())
    except FileNotFoundError:
        return {}


def _say_who_had_it(path: Path, owner: dict[str, Any]) -> None:
    if owner:
        log.warning(
            "Took over the lock of %s from process %s on %s, which ended without releasing it.",
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
    """Rename the complete per-rank files of a killed run to their final names. One rank calls this.

    Nothing is renamed while another run saves to the folder.
    """
    if not any(found["kind"] == "set" for _, found in _unfinished_in(folder)):
        return
    try:
        with FolderLock(folder):
            complete_sets(folder, locked=True)
    except OSError as error:  # in use or read-only: the previous set of files is still valid
        log.warning("Per-rank files in %s that are not yet renamed stay as they are: %s", folder, error)


def remove_leftovers(folder: str | os.PathLike[str], *, locked: bool = False) -> list[Path]:
    """Delete the leftovers of killed writers in a folder.

    Files of a live process of this machine are kept. A folder that was moved aside for its replacement, on a file
    system that cannot swap names, is moved back. Complete per-rank files are renamed to their final names.

    Args:
        folder: The folder of checkpoints. Folders below it are searched too.
        locked: Whether the caller holds the `FolderLock`, which means that writers on other machines and from before a
            reboot are dead. Otherwise their files are kept.

    Returns:
        The deleted paths.
    """
    complete_sets(folder, locked=locked)
    return _remove(_left_in(folder, locked))


def remove_leftovers_of(path: str | os.PathLike[str]) -> list[Path]:
    """Delete the leftovers of killed writers of one file or folder.

    Files of live processes, of other machines, and of a multi-file commit are kept.
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
    """Rename the complete per-rank files of killed writers to their final names."""
    for path in _left_sets(folder, locked):
        durability.complete_set(path)


def complete_earlier_sets(folder: Path, finals: Set[Path]) -> None:
    """Rename files that earlier saves left under temporary names, including saves of this process."""
    for path in sorted(folder.iterdir()):
        found = UNFINISHED.fullmatch(path.name)
        if found is None or found["kind"] != "set" or finals.isdisjoint(durability.files_of_set(path)):
            continue
        # Also those of unknown writers on other machines: left alone, their record could later replace newer files.
        if found["writer"] == this_writer() or not is_alive(found["writer"]):
            durability.complete_set(path)


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
    # A record of a writer that may be alive still needs its temporary files.
    records = [path for path, found in left if found["kind"] == "set"]
    needed = {temporary for record in records for temporary in durability.files_of_set(record).values()}
    return [
        (path, found)
        for path, found in left
        if found["kind"] != "set" and path not in needed and not _may_be_writing(found["writer"], locked)
    ]


def _remove(left: list[tuple[Path, re.Match[str]]]) -> list[Path]:
    removed: list[Path] = []
    for path, found in left:
        home = path.with_name(found["name"])
        # The writer moved the old folder aside, and died before it gave the name to the new one.
        if found["kind"] == "old" and not os.path.lexists(home):
            # If the name was taken meanwhile, the old folder is removed like other leftovers.
            with suppress(FileExistsError):
                durability.rename_without_replacing(path, home)
                log.warning("Put %s back: its writer was killed while replacing it.", home)
                continue
        if durability.discard(path):
            removed.append(path)
            log.warning("Removed %s, which a killed writer had left unfinished.", path)
    return removed


def _home(name: str) -> str:
    """Return the final name of an unfinished file, which may be a temporary file of another unfinished file."""
    found = UNFINISHED.fullmatch(name)
    return name if found is None else _home(found["name"])


def _has_record(writer: str, final: Path) -> bool:
    """Return whether a writer left a record in this folder or a parent, since it may list this file."""
    for folder in final.parents:
        with suppress(OSError), os.scandir(folder) as entries:
            names = (UNFINISHED.fullmatch(entry.name) for entry in entries)
            if any(found is not None and (found["kind"], found["writer"]) == ("set", writer) for found in names):
                return True
    return False


def _may_be_writing(writer: str, locked: bool) -> bool:
    alive = is_alive(writer)
    # A writer on another machine cannot be checked, but would hold the lock.
    return not locked if alive is None else alive
