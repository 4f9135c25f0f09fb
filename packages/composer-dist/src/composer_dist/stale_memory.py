"""Shared memory that a killed run of mosaicml-streaming's datasets left behind.

Those datasets keep what the processes of a node share in `/dev/shm`, under numbered names that all runs of a machine
have in common. A run that is killed with all its helpers leaves its names there: they take memory until the machine
restarts, and a new run that downloads to the same folder is refused ("Reused local directory").
"""

import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["clean_stale_shared_memory", "find_stale_shared_memory", "tidy_shared_memory"]

_log = logging.getLogger(__name__)

_FOLDER = Path("/dev/shm")
_PROCESSES = Path("/proc")
_NAME = re.compile(
    r"(\d{6})_(locals|barrier|next_epoch|cache_usage|shard_states|shard_access_times|resume|epoch_shape|epoch_data)"
)
_LOCKS = ("barrier_filelock", "cache_filelock")
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # the number that Linux gives to the one outside of all containers
_MIN_AGE_S = 1.0  # what is being made may not be in use yet


def clean_stale_shared_memory() -> list[str]:
    """Delete what killed runs of this user left in shared memory, and return the paths.

    What any living process uses stays, unlike with `streaming.base.util.clean_stale_shared_memory`, which takes it from
    under other runs. Call it before a script makes its first StreamingDataset; one process of a node is enough. Without
    `/dev/shm` and `/proc`, which only Linux has, it does nothing.

    Containers that share `/dev/shm` with others, as with `--ipc=host`, do not see their processes: there, call it only
    while no other run is active.

    Example:
        >>> removed = clean_stale_shared_memory()  # such as ['/dev/shm/000000_barrier', '/dev/shm/000000_locals']
    """
    removed: list[str] = []
    for path in find_stale_shared_memory():
        try:
            path.unlink()
        except OSError:  # somebody else was faster
            continue
        removed.append(str(path))
    if removed:
        _log.warning("Deleted shared memory that a killed run left behind: %s.", ", ".join(removed))
    return removed


def tidy_shared_memory() -> None:
    """Do what `clean_stale_shared_memory` does, unless other containers may use the memory: then say how to.

    Where the environment variable `COMPOSER_KEEP_SHARED_MEMORY` is set, it does nothing.
    """
    if os.environ.get("COMPOSER_KEEP_SHARED_MEMORY"):
        return
    if _sees_all_users():
        clean_stale_shared_memory()
        return
    stale = find_stale_shared_memory()
    if stale:
        _log.warning(
            "No process here uses %s, which is all that a killed run leaves behind, but one of another container may. "
            'If there is none, run: python -c "from composer_dist.stale_memory import clean_stale_shared_memory as '
            'clean; clean()"',
            ", ".join(map(str, stale)),
        )


def find_stale_shared_memory() -> list[Path]:
    """Return the files that `clean_stale_shared_memory` would delete."""
    segments: dict[str, list[Path]] = {}
    for path, number in _own_segments():
        segments.setdefault(number, []).append(path)
    if not segments:
        return []
    found: list[Path] = []
    for number in sorted(segments.keys() - _numbers_in_use(segments)):
        locks = (Path(tempfile.gettempdir(), f"{number}_{name}") for name in _LOCKS)
        found += [*sorted(segments[number]), *filter(_is_own, locks)]
    return found


def _sees_all_users() -> bool:
    """Say whether whoever may use `/dev/shm` is among the processes that can be seen from here."""
    try:
        if os.stat(_PROCESSES / "self" / "ns" / "pid").st_ino == _FIRST_PID_NAMESPACE:
            return True
        mounts = (_PROCESSES / "self" / "mounts").read_text()
    except OSError:
        return False
    # Container engines call the one that they make for a container by this name, and pass on the machine's as it is.
    return re.search(rf"^shm {_FOLDER} tmpfs", mounts, re.MULTILINE) is not None


def _own_segments() -> Iterator[tuple[Path, str]]:
    """Yield this user's segments of shared memory, each with the number of the dataset that made it."""
    try:
        names = sorted(os.listdir(_FOLDER))
    except OSError:
        return
    for name in names:
        match = _NAME.fullmatch(name)
        if match and _is_own(_FOLDER / name):
            yield _FOLDER / name, match[1]


def _is_own(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False


def _numbers_in_use(segments: dict[str, list[Path]]) -> set[str]:
    """Return the numbers of which any process has a segment in its memory; all of them if that cannot be known."""
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
    """Return what a process has in its memory, or `None` if it might have this user's segments, and does not say."""
    try:
        return (process / "maps").read_text(errors="replace")
    except PermissionError:
        return None if _may_use_ours(process) else ""
    except OSError:  # it has ended
        return ""


def _may_use_ours(process: Path) -> bool:
    """Say whether a process that keeps its memory to itself runs Python as this user."""
    try:
        owner = re.search(r"^Uid:\s+(\d+)", (process / "status").read_text(), re.MULTILINE)
        command = (process / "cmdline").read_bytes()
    except OSError:
        return False
    return owner is not None and int(owner[1]) == os.getuid() and b"python" in command
