"""One writer at a time in a folder of checkpoints."""

import contextlib
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
    """Keep other processes from saving to a folder as long as this one does.

    The lock is the operating system's, on a hidden file in the folder that says who has it. It ends with the process,
    however that ends, and does not pass to processes that it forks; the next one takes it over and says so in the log.
    It holds between machines where the file system carries such locks (NFS 4, Lustre with `flock`, ...). Where there
    are none, the file itself is the lock: that of a dead process of this machine is taken over, that of another
    machine must be deleted by hand.

    Within one process any number of objects may hold the lock of a folder together, so that two savers can share it.

    Args:
        folder: The folder, made if need be.
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
        """Whether this object holds the lock."""
        return self._hold is not None and self._hold.pid == os.getpid()

    def acquire(self) -> "FolderLock":
        """Take the lock.

        Returns:
            This object.

        Raises:
            FolderInUseError: If another process still has it after `timeout_s`, with that process's host and number.
            StorageError: If the folder cannot be written to.
            RuntimeError: If this object holds it already.
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
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def release(self) -> None:
        """Give the lock back, if it is held."""
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
    """A lock that this process has, and how many objects share it."""

    def __init__(self, path: Path, descriptor: int, key: tuple[int, int]) -> None:
        self.path, self.descriptor, self.key = path, descriptor, key
        self.pid, self.holders = os.getpid(), 1


# The system's record locks belong to the process as a whole, and closing any descriptor of the file drops them: so
# each process opens the file of a folder once, and counts.
_holds: dict[tuple[int, int], _Hold] = {}
_guard = threading.Lock()


def _take(folder: Path) -> _Hold:
    make_folders(folder)
    status = folder.stat()
    key = (status.st_dev, status.st_ino)
    with _guard:
        hold = _holds.get(key)
        if hold is not None and hold.pid == os.getpid():  # another pid: what a fork inherited, and does not hold
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
        # Removed while still locked: who waits sees that its file has lost the name, and opens the new one.
        with contextlib.suppress(OSError):
            hold.path.unlink()
        os.close(hold.descriptor)


def _lock_file(path: Path) -> tuple[int, Path]:
    """Return a descriptor of the file that is the lock, with our name in it, and where it is."""
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
        os.close(descriptor)  # its owner gave it back between our opening and our locking: there is a new one


def _sign(descriptor: int, path: Path) -> None:
    """Write our name into the file, and say whose was in it."""
    try:
        _say_who_had_it(path, _read(descriptor))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _record(), 0)
    except BaseException:  # such as a full disk
        os.close(descriptor)
        raise


def _take_by_name(path: Path) -> tuple[int, Path]:
    """Take the lock where only the existence of a file can tell."""
    own = path.with_name(f"{path.name}.{this_writer()}")
    own.write_bytes(_record())
    try:
        while True:
            try:
                os.link(own, path)  # fails if it exists, and brings its content with it
            except FileExistsError:
                _take_from_the_dead(path, own)
            else:
                return os.open(path, os.O_RDWR), path
    finally:
        own.unlink(missing_ok=True)


def _take_from_the_dead(path: Path, own: Path) -> None:
    """Remove the file of a process that has ended, or raise."""
    owner = _read_path(path)
    if owner and is_alive(owner["writer"]) is not False:
        raise _in_use(path, owner)
    stale = own.with_name(f"{own.name}.stale")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, stale)
        if _read_path(stale) != owner:  # somebody was quicker, and this is theirs
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
    """Return who the file says has the lock, or nothing where it does not say so."""
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
    """Give per-rank files their names, all of which were written when the run before was killed. One rank calls this.

    Nothing is done while another run saves there.
    """
    if not has_sets(folder):
        return
    try:
        with FolderLock(folder):
            complete_sets(folder, locked=True)
    except OSError as error:  # in use, or read-only: the set before is as good
        log.warning("Per-rank files in %s that have no names yet are left alone: %s", folder, error)


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
