"""The processes of one attempt, and the launcher's signals."""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException, SubprocessContext, start_processes

from composer_dist.launch.args import HANG_STATUS, SIGNAL_TIMEOUT_S, CannotStartError, Options
from composer_dist.launch.guardian import Guardian, process_state
from composer_dist.launch.output import Logs
from composer_dist.launch.report import join_ranks
from composer_dist.launch.verdict import Verdict

_NEWS_S = 2.0  # delay after which the launcher may notice a kill that the rank's peers noticed at once
_LINGER_S = 4.0  # time for a rank that has raised to run its exit handlers
_LOOK_AT_STATES_S = 1.0
_KILL_TIMEOUT_S = 2.0
# Exit codes of a rank that ended in an orderly way after SIGINT or SIGTERM.
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a rank, and its cause."""

    rank: int
    local_rank: int
    pid: int
    exit_code: int
    """The exit code of the process: -s if it was killed by signal s."""
    time: float
    """The time of the failure in seconds since 1970: that of the exception, if the rank recorded it."""
    by_itself: bool
    """Whether it failed before the launcher asked any rank to end."""
    has_exited: bool
    """Whether the process also exited by itself; otherwise it raised or was suspended and had to be stopped."""
    what: str
    """A description that continues `rank N`."""
    error: Mapping[str, Any] | None
    stdout: str
    stderr: str
    has_waited: bool = False
    """Whether it was stopped because of a rank for which it waited."""

    @property
    def status(self) -> int:
        """The exit code as in a shell: 128 + s if the process was killed by signal s."""
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code


class Workers:
    """The processes of one attempt."""

    def __init__(
        self,
        commands: Mapping[int, Sequence[str]],
        envs: dict[int, dict[str, str]],
        options: Options,
        logs: Logs,
        guardian: Guardian,
    ) -> None:
        self._envs, self._options = envs, options
        self._exits: dict[int, tuple[int, float]] = {}
        self._stop_time: float | None = None
        self._failed_since: float | None = None
        self._leaving_since: float | None = None
        self._stopped = _Suspensions(options.stopped_timeout)
        self._verdict: Verdict | None = None
        self._stuck: dict[int, str] = {}
        self._waited: dict[int, str] = {}
        settings: dict[str, Any] = {}
        if options.numa_binding is not None:
            from torch.numa.binding import AffinityMode, NumaOptions  # rarely needed

            settings["numa_options"] = NumaOptions(affinity_mode=AffinityMode(options.numa_binding))
        logs.open_targets(envs)
        try:
            context = start_processes(
                name="composer",
                entrypoint=commands[0][0],  # the same program on all ranks
                args={local_rank: tuple(command[1:]) for local_rank, command in commands.items()},
                envs=envs,
                logs_specs=logs,
                **settings,
            )
        except OSError as error:
            raise CannotStartError(
                f"{commands[0][0]!r} cannot be started: {error}. A script that is run with -c must be executable, and "
                "its first line must name its interpreter, such as #!/bin/sh."
            ) from error
        assert isinstance(context, SubprocessContext)  # the entrypoint is a program
        self._context = context
        guardian.watch(self.pids.values())
        self._pidfds = _open_pidfds(self.pids)
        logs.start_copies(envs)

    @property
    def pids(self) -> dict[int, int]:
        """The PID of each local rank, which is also its process group."""
        return self._context.pids()

    @property
    def ranks(self) -> list[int]:
        """The global ranks."""
        return [int(env["RANK"]) for env in self._envs.values()]

    @property
    def are_done(self) -> bool:
        """Return whether all ranks have ended."""
        return len(self._exits) == len(self._envs)

    @property
    def exit_codes(self) -> dict[int, int]:
        """The exit code of each local rank that has ended; also from another thread."""
        return {local_rank: code for local_rank, (code, _) in list(self._exits.items())}

    @property
    def has_verdict(self) -> bool:
        """Return whether ranks without progress have been named."""
        return self._verdict is not None

    def take_verdict(self, verdict: Verdict) -> None:
        """Count the stuck ranks as failed; those that wait for a rank that has ended, or is elsewhere, instead."""
        self._verdict = verdict
        running = {int(env["RANK"]): local_rank for local_rank, env in self._envs.items()}
        running = {rank: local_rank for rank, local_rank in running.items() if local_rank not in self._exits}
        stuck = {
            lr: f"made no progress: it {verdict.stuck[rank]}" for rank, lr in running.items() if rank in verdict.stuck
        }
        self._waited = {} if stuck else dict.fromkeys(running.values(), f"waited for {_blame(verdict.stuck)}")
        self._stuck = stuck or self._waited

    @property
    def status_of_stop(self) -> int:
        """The exit code of all ranks if a signal to one of them stopped them together, else 0."""
        codes = {code for code, _ in self._exits.values()}
        was_told = self.are_done and len(codes) == 1 and not self.has_verdict
        was_told = was_told and not any(map(self.error_of, self._envs))
        return codes.pop() if was_told and codes.issubset(_STOPPED) else 0

    def look(self, timeout_s: float) -> bool:
        """Wait for an event, and return whether a rank has failed.

        A rank that ended in an orderly way after a signal has not failed while the others may still follow it.
        """
        self._wait(timeout_s)
        self._collect()
        states = self._stopped.look({lr: pid for lr, pid in self.pids.items() if lr not in self._exits})
        has_raised = self._failed_since is None and any(self.error_of(lr) for lr in self._envs if lr not in self._exits)
        has_failed = any(code and code not in _STOPPED for code, _ in self._exits.values()) or states
        has_failed = has_failed or self._leaves_others_behind()
        if (has_raised or has_failed) and self._failed_since is None:
            self._failed_since = time.monotonic()
        lingers = self._failed_since is not None and time.monotonic() - self._failed_since > _LINGER_S
        return has_failed or lingers

    def _leaves_others_behind(self) -> bool:
        """Return whether a rank stopped after a signal and the others did not follow in time."""
        if self.status_of_stop or not any(code in _STOPPED for code, _ in self._exits.values()):
            return False
        self._leaving_since = self._leaving_since or time.monotonic()
        asked = self._options.shutdown_timeout
        patience_s = SIGNAL_TIMEOUT_S if asked is None else asked
        return self.are_done or time.monotonic() - self._leaving_since > patience_s

    def stop(self, signum: signal.Signals, timeout_s: float) -> None:
        """Send a signal to all running ranks, and kill those that do not end in time."""
        self._stop_time = self._stop_time or time.time()  # later failures are consequences of the stop
        since = self._failed_since or time.monotonic()
        for local_rank, pid in self.pids.items():
            if local_rank not in self._exits and process_state(pid) == "T":
                os.killpg(pid, signal.SIGCONT)  # a suspended process does not handle other signals
        remaining = max(0.0, since + timeout_s - time.monotonic())
        self._context.close(signum, remaining)  # pyright: ignore[reportArgumentType]  # fractions of seconds work
        self._collect()

    def kill(self) -> None:
        """Kill all running ranks."""
        self._stop_time = self._stop_time or time.time()
        self._context.close(signal.SIGKILL, int(_KILL_TIMEOUT_S))
        self._collect()

    def failures(self) -> list[Ending]:
        """Return the ranks that failed by themselves, in order of time."""
        if self.status_of_stop:
            return []
        failed = (
            self._exits.keys()
            | self._stopped.too_long.keys()
            | self._stuck.keys()
            | {lr for lr in self._envs if self.error_of(lr)}
        )
        endings = [ending for ending in map(self._ending, failed) if ending.by_itself]
        are_lost = any(map(_has_lost_connection, endings))

        def began(ending: Ending) -> float:
            if ending.local_rank in self._stuck:  # the others waited for it
                return 0.0
            # On a busy machine, the peers of a killed rank record their lost connection before its end is seen here.
            killed = ending.exit_code == -signal.SIGKILL or (ending.exit_code == -signal.SIGABRT and are_lost)
            return ending.time - _NEWS_S if killed and ending.has_exited else ending.time

        return sorted(endings, key=began)

    def close(self) -> None:
        """Release files and threads after all ranks have ended."""
        self._context.close()
        for handler in self._context.subprocess_handlers.values():
            # No public way: torch closes its side of a rank's files only if it had to signal the rank.
            for file in (getattr(handler, "_stdout", None), getattr(handler, "_stderr", None)):
                if file is not None:
                    file.close()
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()

    def _wait(self, timeout_s: float) -> None:
        """Sleep until a rank ends, if the system can report it; then the order of failures is certain."""
        running = [pidfd for local_rank, pidfd in self._pidfds.items() if local_rank not in self._exits]
        if running:
            wait(running, timeout_s)  # returns as soon as a rank ends
        else:
            time.sleep(timeout_s)

    def _collect(self) -> None:
        for local_rank, handler in self._context.subprocess_handlers.items():
            code = handler.proc.poll()
            if code is None or local_rank in self._exits:
                continue
            self._exits[local_rank] = (code, time.time())
            if code == 0:
                _log.info("Rank %s finished successfully.", self._envs[local_rank]["RANK"])

    def error_of(self, local_rank: int) -> Mapping[str, Any] | None:
        """Return the exception recorded by the rank's own process, which has ended or is about to."""
        error = self._error(local_rank)
        return error if error is not None and error.get("pid") == self.pids[local_rank] else None

    def _error(self, local_rank: int) -> Mapping[str, Any] | None:
        """Return the exception recorded by the rank or by one of its child processes."""
        try:
            error = json.loads(Path(self._envs[local_rank]["COMPOSER_ERROR_FILE"]).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return error if isinstance(error, dict) and "exception_type" in error else None

    def _ending(self, local_rank: int) -> Ending:
        env, error = self._envs[local_rank], self.error_of(local_rank)
        stop_time = self._stop_time or time.time()
        code, failed = self._exits.get(local_rank, (None, time.time()))
        # A signal after the stop came from the launcher.
        was_stopped = code is None or (code < 0 and failed > stop_time)
        suspended_s = self._stopped.too_long.get(local_rank)
        if suspended_s is not None:
            code, failed, what = -signal.SIGSTOP, stop_time, f"was suspended by SIGSTOP for {suspended_s:.0f} s"
        elif local_rank in self._stuck:
            code, failed, what = HANG_STATUS, stop_time, self._stuck[local_rank]
        elif error is not None and was_stopped:
            code, what = 1, "raised an exception and was stopped"
        else:
            code = -signal.SIGKILL if code is None else code  # still running after SIGKILL, as when stuck in a driver
            what = _describe(code)
        if error is not None and suspended_s is None and local_rank not in self._stuck:
            failed = float(error["timestamp"])
        elif code > 0:
            error = self._error(local_rank)  # a child process may have recorded the cause
        return Ending(
            rank=int(env["RANK"]),
            local_rank=local_rank,
            pid=self.pids[local_rank],
            exit_code=code,
            time=failed,
            by_itself=code != 0 and failed <= stop_time,
            has_exited=not was_stopped,
            what=what,
            has_waited=local_rank in self._waited,
            error=error,
            stdout=self._context.stdouts[local_rank],
            stderr=self._context.stderrs[local_rank],
        )


def _has_lost_connection(ending: Ending) -> bool:
    message = str(ending.error.get("message", "")).lower() if ending.error else ""
    return "reset by peer" in message or "closed by peer" in message


def _blame(stuck: Mapping[int, str]) -> str:
    """Return the ranks for which the others waited, and what it does if it is one."""
    what = "".join(f", which {each}" for each in stuck.values()) if len(stuck) == 1 else ""
    return f"{join_ranks(sorted(stuck))}{what}"


class _Suspensions:
    """Durations for which processes have been suspended; stops by a debugger do not count."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._looked_at: float | None = None
        self._dwell_s: dict[int, float] = {}
        self.too_long: dict[int, float] = {}

    def look(self, pids: Mapping[int, int]) -> bool:
        """Update the durations at most once a second, and return whether one exceeds the limit."""
        now = time.monotonic()
        if not self._timeout_s or (self._looked_at is not None and now - self._looked_at < _LOOK_AT_STATES_S):
            return bool(self.too_long)
        # Limited, since `scontrol suspend` stops the launcher along with the ranks, and that time must not count.
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, 2 * _LOOK_AT_STATES_S)
        self._looked_at = now
        for local_rank, pid in pids.items():
            if process_state(pid) != "T":
                self._dwell_s.pop(local_rank, None)
                continue
            # Starts at 0, since a process may have been suspended right before it is first seen so.
            self._dwell_s[local_rank] = self._dwell_s.get(local_rank, -passed) + passed
            if self._dwell_s[local_rank] >= self._timeout_s:
                self.too_long[local_rank] = self._dwell_s[local_rank]
        return bool(self.too_long)


def _open_pidfds(pids: Mapping[int, int]) -> dict[int, int]:
    """Return a descriptor of each process that becomes ready when it ends; none on systems without pidfds."""
    if not hasattr(os, "pidfd_open"):
        return {}
    try:
        return {local_rank: os.pidfd_open(pid) for local_rank, pid in pids.items()}
    except OSError:  # not allowed in some sandboxes
        return {}


def _describe(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"exited with code {128 - code} (killed by {name})"


_log = logging.getLogger("composer_dist.launch")


_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


class Signals:
    """The signals of one launch."""

    def __init__(self, names: str) -> None:
        self.followed: signal.Signals | None = None
        """The signal because of which the ranks were asked to end."""
        self._handlers = _handlers(names)
        self._received: signal.Signals | None = None
        self._is_ending = False
        self._is_interruptible = False
        self._must_hurry = False

    @contextmanager
    def while_starting(self) -> Iterator[None]:
        """Make torch, which sets its own handlers on each start of processes, use these signals."""
        before = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = ",".join(signum.name for signum in self._handlers)
        try:
            yield
        finally:
            if before is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = before
        self._handle()

    @contextmanager
    def while_ending(self, followed: signal.Signals | None) -> Iterator[None]:
        """Defer signals that would interrupt the end of the ranks."""
        self._is_ending = True
        self._handle()
        self.followed = followed
        self._received = followed or self._received
        try:
            yield
        finally:
            self._is_ending = False

    @contextmanager
    def while_interruptible(self) -> Iterator[None]:
        """Make SIGINT raise `SignalException`, even if it arrived just before."""
        self._is_interruptible = True
        try:
            if self._must_hurry:
                _raise(signal.SIGINT)
            yield
        finally:
            self._is_interruptible = False

    def catch_up(self) -> None:
        """Raise for a signal that arrived while the ranks ended for another reason."""
        if self.followed is None and self._received is not None:
            _raise(self._received)

    def ignore(self) -> None:
        """Ignore the signals from now on."""
        for signum in self._handlers:
            signal.signal(signum, signal.SIG_IGN)

    def restore(self) -> None:
        """Restore the handlers from before the launch."""
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def _handle(self) -> None:
        for signum in self._handlers:
            signal.signal(signum, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        signum = signal.Signals(number)
        if self._is_ending or self._received is not None:
            self._received = self._received or signum
            self._must_hurry |= signum == signal.SIGINT
            if self._is_interruptible and self._must_hurry:
                _raise(signum)
            return
        self._received = signum
        _raise(signum)


def _raise(signum: signal.Signals) -> None:
    raise SignalException(f"process {os.getpid()} got {signum.name}", signum)


def _handlers(names: str) -> dict[signal.Signals, Any]:
    """Return the current handlers of the signals that this process handles.

    Signals that are ignored, as nohup and shells do for background processes, stay ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}  # only the main thread may set handlers in Python
    handlers = {signal.Signals[name.strip()]: signal.SIG_DFL for name in names.split(",")}
    handlers = {signum: signal.getsignal(signum) or default for signum, default in handlers.items()}
    return {signum: handler for signum, handler in handlers.items() if handler != signal.SIG_IGN}
