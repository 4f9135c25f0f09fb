"""A helper process that kills the ranks if the launcher is killed.

The launcher sends it process groups through a pipe, which the system closes however the launcher ends. It runs in its
own session, so signals to the launcher's process group do not reach it. This file is also its program, run without
site-packages: it imports the standard library only.
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

LAUNCH_ID = "COMPOSER_LAUNCH_ID"
"""The variable that identifies the processes of a launch, in any process group."""
_SWEEP_S = 5.0
_QUIET_S = 1.0  # longer than a busy machine needs from fork to exec
_LINGER_S = 1.0  # helpers such as Python's resource tracker end shortly after their process


class Guardian:
    """The launcher's interface to the guardian."""

    def __init__(self, launch_id: str) -> None:
        self.launch_id = launch_id
        self._groups: set[int] = set()
        # -I and -S: environment variables and site-packages must neither slow it down nor change it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, launch_id, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            # Inside another launch, the sweep of that launch must not kill this guardian together with the launcher.
            env={name: value for name, value in os.environ.items() if name != LAUNCH_ID},
            text=True,
        )

    def watch(self, groups: Iterable[int]) -> None:
        """Add process groups to kill at the end."""
        new = set(groups)
        self._groups |= new
        self._tell("".join(f"{group}\n" for group in new))

    def sweep(self, *, spare_detached: bool) -> list[int]:
        """Kill the remaining processes of the launch, and return their PIDs.

        Args:
            spare_detached: Whether to spare processes in sessions of their own, such as services, and to give the
                others some time to end by themselves. For runs without a failure.
        """
        if spare_detached:
            _wait_for(self._groups, _LINGER_S)
        killed = sweep(self._groups, None if spare_detached else self.launch_id)
        self._groups.clear()  # the system may reuse the numbers
        self._tell("\n")  # makes the guardian forget the groups, too
        return killed

    def close(self) -> None:
        """Stop the guardian; remaining processes are no longer cleaned up."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # if the guardian was killed, the run continues without it
            self._process.stdin.write(text)
            self._process.stdin.flush()


def sweep(groups: Iterable[int], launch_id: str | None, timeout_s: float = _SWEEP_S, quiet_s: float = 0.0) -> list[int]:
    """Kill process groups, and all processes with a launch's identity in their environment.

    Without `/proc` (systems other than Linux) only the groups are found.

    Args:
        groups: Numbers of process groups.
        launch_id: The identity, or `None` for the groups only.
        timeout_s: Time for which processes that do not end are killed again.
        quiet_s: Time without any such process before this returns.

    Returns:
        PIDs of the processes that were found.
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
        time.sleep(0.02)  # a process forked meanwhile is found in the next round


def new_launch_id() -> str:
    """Return an identity for a launch by this process, which includes its PID and start time."""
    return f"{uuid.uuid4().hex}-{os.getpid()}-{_start_time(os.getpid())}"


def is_within(launch_id: str) -> bool:
    """Return whether this process descends from the launcher with an identity.

    Without `/proc` this cannot be determined, and any identity counts.
    """
    _, _, process = launch_id.partition("-")
    if not process or not Path("/proc/self/stat").exists():
        return bool(process)
    pid = os.getpid()
    while pid > 0:
        if process == f"{pid}-{_start_time(pid)}":  # a PID alone may have been reused
            return True
        fields = _stat(pid)
        pid = int(fields[1]) if fields else 0
    return False


def process_state(pid: int) -> str | None:
    """Return Linux's letter for a process's state, such as `'T'` for stopped, or `None`."""
    fields = _stat(pid)
    return fields[0] if fields else None


def _wait_for(groups: set[int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(_members(groups, None)) and time.monotonic() < deadline:
        time.sleep(0.02)


def _members(groups: set[int], launch_id: str | None) -> Iterator[int]:
    marker = f"{LAUNCH_ID}={launch_id}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        fields = _stat(pid)
        if pid == os.getpid() or not fields or fields[0] in "ZX":  # zombie or dead: ended, but not reaped yet
            continue
        found = int(fields[2]) in groups
        if not found and launch_id is not None:
            with contextlib.suppress(OSError):  # ended, or owned by another user
                found = marker in (entry / "environ").read_bytes().split(b"\0")
        if found:
            yield pid


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` after the name: state, parent, process group, and so on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name may contain any characters, including brackets


def _start_time(pid: int) -> str:
    fields = _stat(pid)
    return fields[19] if fields else ""  # field 22 in proc(5), without the PID and the name


def _main(launch_id: str, launcher: str) -> None:
    """Wait for the launcher to end without closing the guardian, and kill its processes."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:  # ends when the pipe closes
        if line.strip():
            groups.add(int(line))
        else:
            groups.clear()  # swept by the launcher itself
    # A process that was being started when the launcher was killed gets the identity only at its exec.
    killed = sweep(groups, launch_id, quiet_s=_QUIET_S)
    if killed:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"composer: the launcher (PID {launcher}) is gone; its processes were killed: {killed}\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
