"""Which process wrote something, and whether it is still alive."""

import hashlib
import os
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path

__all__ = ["WRITER_PATTERN", "is_alive", "this_writer"]

# Machine, process and when it started, so that a process number that the system gave out again is not mistaken.
WRITER_PATTERN = r"[0-9a-f]{8}-[0-9]+-[0-9]+"


def this_writer() -> str:
    """Return a text that names this process among all that share a file system.

    Example:
        >>> is_alive(this_writer())
        True
    """
    return f"{_machine()}-{os.getpid()}-{_start_time(os.getpid()) or 0}"


def is_alive(writer: str) -> bool | None:
    """Return whether the process still runs, or `None` where this machine cannot know.

    Args:
        writer: What `this_writer` returned, here or elsewhere.
    """
    machine, pid, started = writer.split("-")
    if machine != _machine():
        return None
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's process
        pass
    now = _start_time(int(pid))
    return now == int(started) if now is not None else not _has_proc()


@cache
def _machine() -> str:
    """Return what process numbers are unique within: the host, its boot, and the container's table of processes."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # without Linux, the host's name is what there is
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=4).hexdigest()


def _start_time(pid: int) -> int | None:
    """Return when a process started, in the kernel's ticks; None if it is gone, a zombie, or not to be known."""
    try:
        # The second field is the program's name in parentheses, and may hold spaces and parentheses itself.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def _has_proc() -> bool:
    return Path("/proc/self/stat").exists()
