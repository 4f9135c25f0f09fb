"""A small process that outlives the launcher, if that is killed, and then kills what the launcher had started.

It hears from the launcher through a pipe, whose end the system closes however the launcher ends, and it sits in a
session of its own, so that what is sent to the launcher's process group does not reach it. This file is also the
program that it runs, without site-packages: it imports the standard library only.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["LAUNCH_ID", "Guardian", "is_within", "new_launch_id", "process_state", "sweep"]

LAUNCH_ID = "COMPOSER_LAUNCH_ID"
"""The variable by which the processes of a launch are found, wherever they went."""
_SWEEP_S = 5.0
_QUIET_S = 1.0  # longer than a busy machine takes from fork to exec
_LINGER_S = 1.0  # what tidies up after a process that ended well, such as Python's resource tracker, ends after it


class Guardian:
    """The guardian as the launcher sees it.

    Args:
        launch_id: What the variable `COMPOSER_LAUNCH_ID` of the ranks is set to.
    """

    def __init__(self, launch_id: str) -> None:
        self.launch_id = launch_id
        self._groups: set[int] = set()
        # -I and -S: no environment variable and no site-packages may slow it down or change it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, launch_id, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            # Were this launch part of another one, that other's sweep would take the guardian with the launcher.
            env={name: value for name, value in os.environ.items() if name != LAUNCH_ID},
            text=True,
        )

    def watch(self, groups: Iterable[int]) -> None:
        """Add process groups to those that are to be killed in the end."""
        new = set(groups)
        self._groups |= new
        self._tell("".join(f"{group}\n" for group in new))

    def sweep(self, *, spare_detached: bool) -> list[int]:
        """Kill what is left of the launch, and return whom that hit.

        Args:
            spare_detached: Leave processes alone that went into sessions of their own, as services do, and give the
                others a moment to end by themselves. Nothing has failed then.
        """
        if spare_detached:
            _wait_for(self._groups, _LINGER_S)
        killed = sweep(self._groups, None if spare_detached else self.launch_id)
        self._groups.clear()  # before long their numbers may be somebody else's
        self._tell("\n")
        return killed

    def close(self) -> None:
        """Dismiss the guardian: from now on nobody looks after what is left."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody killed it; the run goes on without
            self._process.stdin.write(text)
            self._process.stdin.flush()


def sweep(groups: Iterable[int], launch_id: str | None, timeout_s: float = _SWEEP_S, quiet_s: float = 0.0) -> list[int]:
    """Kill process groups, and whatever else was started with a launch's identity in its environment.

    Without `/proc` (systems other than Linux) only the groups are found.

    Args:
        groups: Numbers of process groups.
        launch_id: The identity, or `None` for the groups only.
        timeout_s: For how long processes that do not go away are tried again.
        quiet_s: For how long nobody may have shown up in the end.

    Returns:
        The processes that were still there, as far as they could be seen.
    """
    seen: set[int] = set()
    groups = set(groups)
    now_s = last_seen_s = time.monotonic()
    deadline_s = now_s + timeout_s
    while True:
        left = set(_members(groups, launch_id))
        seen |= left
        now_s = time.monotonic()
        if left:
            last_seen_s = now_s
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if now_s > deadline_s or (not left and now_s - last_seen_s >= quiet_s):
            return sorted(seen)
        time.sleep(0.02)  # what was being forked just now shows itself in the next round


def new_launch_id() -> str:
    """Return an identity for a launch by this process, which also tells which process that is."""
    return f"{uuid.uuid4().hex}-{os.getpid()}-{_start_time(os.getpid())}"


def is_within(launch_id: str) -> bool:
    """Return whether this process, or one above it, is the launcher with an identity.

    Without `/proc` that cannot be seen, and is taken for granted.

    Args:
        launch_id: What the variable `COMPOSER_LAUNCH_ID` holds; `''` where there is none.
    """
    _, _, process = launch_id.partition("-")
    if not process or not Path("/proc/self/stat").exists():
        return bool(process)
    pid = os.getpid()
    while pid > 0:
        if process == f"{pid}-{_start_time(pid)}":  # the number alone may be somebody else's by now
            return True
        fields = _stat(pid)
        pid = int(fields[1]) if fields else 0
    return False


def process_state(pid: int) -> str | None:
    """Return the letter by which Linux names a process's state, such as `'T'` for stopped, or `None`."""
    fields = _stat(pid)
    return fields[0] if fields else None


def _wait_for(groups: set[int], timeout_s: float) -> None:
    """Wait until the processes of some groups have ended by themselves, or the time is over."""
    deadline = time.monotonic() + timeout_s
    while any(_members(groups, None)) and time.monotonic() < deadline:
        time.sleep(0.02)


def _members(groups: set[int], launch_id: str | None) -> Iterator[int]:
    """Yield the living processes of the groups and of the launch, other than this one."""
    marker = f"{LAUNCH_ID}={launch_id}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        fields = _stat(pid)
        if pid == os.getpid() or not fields or fields[0] in "ZX":
            continue
        if int(fields[2]) in groups or (launch_id is not None and marker in _environment(entry)):
            yield pid


def _stat(pid: int) -> list[str]:
    """Return the fields after the name: state, parent, process group, and so on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name may hold anything, also brackets


def _start_time(pid: int) -> str:
    """Return when a process was started, in ticks since the system was."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def _environment(entry: Path) -> list[bytes]:
    try:
        return (entry / "environ").read_bytes().split(b"\0")
    except OSError:  # gone, or somebody else's
        return []


def _main(launch_id: str, launcher: str) -> None:
    """Wait for the launcher's end, which must have been a sudden one, and kill what it started."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:  # until the pipe is closed
        if line.strip():
            groups.add(int(line))
        else:
            groups.clear()  # the launcher itself has swept them
    # What the launcher was about to start when it was killed has the launch's identity a moment later.
    killed = sweep(groups, launch_id, quiet_s=_QUIET_S)
    if killed:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"composer: the launcher (PID {launcher}) is gone; its processes were killed: {killed}\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
