"""Removal of shared memory that killed runs of mosaicml-streaming left behind.

The datasets of a node share state through `/dev/shm`, under numbered names common to all runs of a machine. If a run
is killed together with its helper processes, its entries stay: they use memory until a reboot, and a new run that
downloads to the same folder fails with "Reused local directory".
"""

import logging
import os
import re
import tempfile
import time
from pathlib import Path

_log = logging.getLogger(__name__)

_FOLDER = Path("/dev/shm")
_PROCESSES = Path("/proc")
_NAME = re.compile(
    r"(\d{6})_(locals|barrier|next_epoch|cache_usage|shard_states|shard_access_times|resume|epoch_shape|epoch_data)"
)
_LOCKS = ("barrier_filelock", "cache_filelock")
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # inode of the host's namespace in Linux
_MIN_AGE_S = 1.0  # a newer segment may belong to a run that has not mapped it yet


def clean_stale_shared_memory() -> list[str]:
    """Delete this user's shared memory that killed runs left behind, and return the paths.

    Memory of living processes is kept, unlike with `streaming.base.util.clean_stale_shared_memory`, which takes it
    from other runs. Call it in one process of a node, before the script creates its first StreamingDataset. It needs
    `/dev/shm` and `/proc`, and does nothing on systems other than Linux.

    A container that shares `/dev/shm` with others, as with `--ipc=host`, does not see their processes: call it there
    only while no other run is active.

    Example:
        >>> removed = clean_stale_shared_memory()  # such as ['/dev/shm/000000_barrier', '/dev/shm/000000_locals']
    """
    removed: list[str] = []
    for path in find_stale_shared_memory():
        try:
            path.unlink()
        except OSError:  # another process deleted it first
            continue
        removed.append(str(path))
    if removed:
        _log.warning("Deleted shared memory that a killed run left behind: %s.", ", ".join(removed))
    return removed


def tidy_shared_memory() -> None:
    """Delete stale shared memory, or log how to do so if other containers may use it.

    Does nothing if the environment variable `COMPOSER_KEEP_SHARED_MEMORY` is set.
    """
    if os.environ.get("COMPOSER_KEEP_SHARED_MEMORY"):
        return
    if _sees_all_users():
        clean_stale_shared_memory()
        return
    stale = find_stale_shared_memory()
    if stale:
        _log.warning(
            "No process here uses %s, probably left behind by a killed run, but a process of another container may. "
            'If none does, run: python -c "from composer_dist.stale_memory import clean_stale_shared_memory as '
            'clean; clean()"',
            ", ".join(map(str, stale)),
        )


def find_stale_shared_memory() -> list[Path]:
    """Return the files that `clean_stale_shared_memory` would delete."""
    try:
        names = sorted(os.listdir(_FOLDER))
    except OSError:
        return []
    segments: dict[str, list[Path]] = {}
    for name in names:
        if (match := _NAME.fullmatch(name)) and _is_own(_FOLDER / name):
            segments.setdefault(match[1], []).append(_FOLDER / name)
    if not segments:
        return []
    found: list[Path] = []
    # The locks of the datasets are files in the temporary folder, not in shared memory.
    for number in sorted(segments.keys() - _numbers_in_use(segments)):
        locks = (Path(tempfile.gettempdir(), f"{number}_{name}") for name in _LOCKS)
        found += [*sorted(segments[number]), *filter(_is_own, locks)]
    return found


def _sees_all_users() -> bool:
    """Return whether all processes that may use `/dev/shm` are visible from here."""
    try:
        if os.stat(_PROCESSES / "self" / "ns" / "pid").st_ino == _FIRST_PID_NAMESPACE:
            return True
        mounts = (_PROCESSES / "self" / "mounts").read_text()
    except OSError:
        return False
    # Container engines mount a container's own memory under this name; a host's memory keeps the host's entry.
    return re.search(rf"^shm {_FOLDER} tmpfs", mounts, re.MULTILINE) is not None


def _is_own(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False


def _numbers_in_use(segments: dict[str, list[Path]]) -> set[str]:
    """Return the numbers whose segments a process has mapped, or all of them if that cannot be determined."""
    newest = time.time() - _MIN_AGE_S
    in_use = {number for number, paths in segments.items() if any(_changed_s(path) > newest for path in paths)}
    try:
        processes = [entry for entry in _PROCESSES.iterdir() if entry.name.isdigit()]
    except OSError:
        return set(segments)
    pattern = re.compile(rf"{re.escape(str(_FOLDER))}/(\d{{6}})_")
    for process in processes:
        maps = _maps(process)
        if maps is None:
            return set(segments)
        in_use.update(pattern.findall(maps))
    return in_use


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_ctime
    except OSError:
        return 0.0


def _maps(process: Path) -> str | None:
    """Return a process's memory maps, or `None` if they are unreadable and it might use this user's segments."""
    try:
        return (process / "maps").read_text(errors="replace")
    except PermissionError:
        return None if _may_use_ours(process) else ""
    except OSError:  # the process has ended
        return ""


def _may_use_ours(process: Path) -> bool:
    """Return whether a process with unreadable memory maps runs Python as this user."""
    try:
        owner = re.search(r"^Uid:\s+(\d+)", (process / "status").read_text(), re.MULTILINE)
        command = (process / "cmdline").read_bytes()
    except OSError:
        return False
    return owner is not None and int(owner[1]) == os.getuid() and b"python" in command
