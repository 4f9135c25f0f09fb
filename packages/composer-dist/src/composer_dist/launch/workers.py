"""The processes of one attempt: started by torch.distributed.elastic, watched until all end or one fails."""

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

from composer_dist.launch.args import SIGNAL_TIMEOUT_S, Options
from composer_dist.launch.guardian import Guardian, process_state
from composer_dist.launch.output import Logs
from composer_dist.launch.preflight import CannotStartError

__all__ = [
    "Signals",
    "Ending",
    "Workers",
]

_NEWS_S = 2.0  # how much later than its peers the launcher may learn that a rank was killed
_LINGER_S = 4.0  # how long a rank that has raised may take to end, with its exit handlers
_LOOK_AT_STATES_S = 1.0
_KILL_TIMEOUT_S = 2.0
# What a rank exits with that was asked to stop by SIGINT or SIGTERM, and did so in order.
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a rank ended, and by itself or not."""

    rank: int
    local_rank: int
    pid: int
    exit_code: int
    """As the system gives it: -s for a process killed by signal s."""
    time: float
    """When it failed, in seconds since 1970: the exception's time where the rank told it."""
    by_itself: bool
    """Whether it failed before the launcher asked any rank to end."""
    has_exited: bool
    """Whether it ended by itself too; else it raised or was suspended, and had to be ended."""
    what: str
    """The same in words, after `rank N`."""
    error: Mapping[str, Any] | None
    stdout: str
    stderr: str

    @property
    def status(self) -> int:
        """The exit code as a shell gives it: 128 + s for a process killed by signal s."""
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code


def _when_it_began(ending: Ending) -> float:
    """Return when a failure began, as far as its order among the others goes.

    On a busy machine a killed rank's peers lose their connection to it, and say when, before the launcher sees it gone.
    """
    was_killed = ending.exit_code == -signal.SIGKILL and ending.has_exited
    return ending.time - _NEWS_S if was_killed else ending.time


class Workers:
    """The processes of one attempt.

    Args:
        commands: For each local rank, what it runs.
        envs: For each local rank, the variables that it has beside the launcher's.
        options: What was typed.
        logs: Where their output goes.
        guardian: Who is told of them.
    """

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
        settings: dict[str, Any] = {}
        if options.numa_binding is not None:
            from torch.numa.binding import AffinityMode, NumaOptions  # nobody else needs it

            settings["numa_options"] = NumaOptions(affinity_mode=AffinityMode(options.numa_binding))
        logs.open_targets(envs)
        try:
            context = start_processes(
                name="composer",
                entrypoint=commands[0][0],
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
        """The process of each local rank; each one leads a process group."""
        return self._context.pids()

    @property
    def ranks(self) -> list[int]:
        """The global ranks."""
        return [int(env["RANK"]) for env in self._envs.values()]

    @property
    def are_done(self) -> bool:
        """Whether all have ended."""
        return len(self._exits) == len(self._envs)

    @property
    def status_of_stop(self) -> int:
        """The exit code of all ranks if they stopped together, as somebody had asked one of them to; else 0."""
        codes = {code for code, _ in self._exits.values()}
        was_told = self.are_done and len(codes) == 1 and not any(map(self._own_error, self._envs))
        return codes.pop() if was_told and codes.issubset(_STOPPED) else 0

    def look(self, timeout_s: float) -> bool:
        """Wait until something may have happened, and say whether a rank has failed.

        A rank that stopped in order has not, as long as the others may be about to do so, too.

        Args:
            timeout_s: How long to wait at most.
        """
        self._wait(timeout_s)
        self._collect()
        states = self._stopped.look({lr: pid for lr, pid in self.pids.items() if lr not in self._exits})
        has_raised = self._failed_since is None and any(
            self._own_error(lr) for lr in self._envs if lr not in self._exits
        )
        has_failed = any(code and code not in _STOPPED for code, _ in self._exits.values()) or states
        has_failed = has_failed or self._leaves_others_behind()
        if (has_raised or has_failed) and self._failed_since is None:
            self._failed_since = time.monotonic()
        lingers = self._failed_since is not None and time.monotonic() - self._failed_since > _LINGER_S
        return has_failed or lingers

    def _leaves_others_behind(self) -> bool:
        """Say whether a rank stopped in order, and others have not followed it although they had the time."""
        if self.status_of_stop or not any(code in _STOPPED for code, _ in self._exits.values()):
            return False
        self._leaving_since = self._leaving_since or time.monotonic()
        asked = self._options.shutdown_timeout
        patience_s = SIGNAL_TIMEOUT_S if asked is None else asked
        return self.are_done or time.monotonic() - self._leaving_since > patience_s

    def stop(self, signum: signal.Signals, timeout_s: float) -> None:
        """Send a signal to all that still run, and kill those that do not end in time.

        Args:
            signum: The signal.
            timeout_s: In seconds, from the first sign of a failure if there was one.
        """
        self._stop_time = self._stop_time or time.time()
        since = self._failed_since or time.monotonic()
        for local_rank, pid in self.pids.items():
            if local_rank not in self._exits and process_state(pid) == "T":
                os.killpg(pid, signal.SIGCONT)  # it would not see any other signal
        remaining = max(0.0, since + timeout_s - time.monotonic())
        self._context.close(signum, remaining)  # pyright: ignore[reportArgumentType]  # fractions of seconds work
        self._collect()

    def kill(self) -> None:
        """Kill all that still run."""
        self._stop_time = self._stop_time or time.time()
        self._context.close(signal.SIGKILL, int(_KILL_TIMEOUT_S))
        self._collect()

    def failures(self) -> list[Ending]:
        """Return the ranks that failed by themselves, in the order in which they did."""
        if self.status_of_stop:
            return []
        failed = self._exits.keys() | self._stopped.too_long.keys() | {lr for lr in self._envs if self._own_error(lr)}
        endings = (self._ending(local_rank) for local_rank in failed)
        return sorted((ending for ending in endings if ending.by_itself), key=_when_it_began)

    def close(self) -> None:
        """Let go of files and threads once all have ended."""
        self._context.close()
        for handler in self._context.subprocess_handlers.values():
            # No public way: torch closes its end of a rank's files only if it had to signal the rank.
            for file in (getattr(handler, "_stdout", None), getattr(handler, "_stderr", None)):
                if file is not None:
                    file.close()
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()

    def _wait(self, timeout_s: float) -> None:
        """Sleep, or wake up when a rank ends where the system can tell; then the first to end is known for sure."""
        running = [pidfd for local_rank, pidfd in self._pidfds.items() if local_rank not in self._exits]
        if running:
            wait(running, timeout_s)
        else:
            time.sleep(timeout_s)

    def _collect(self) -> None:
        """Take down who has ended."""
        for local_rank, handler in self._context.subprocess_handlers.items():
            code = handler.proc.poll()
            if code is None or local_rank in self._exits:
                continue
            self._exits[local_rank] = (code, time.time())
            if code == 0:
                _log.info("Rank %s finished successfully.", self._envs[local_rank]["RANK"])

    def _own_error(self, local_rank: int) -> Mapping[str, Any] | None:
        """Return what the rank's own process wrote about the exception that ended it, or is about to."""
        error = self._error(local_rank)
        return error if error is not None and error.get("pid") == self.pids[local_rank] else None

    def _error(self, local_rank: int) -> Mapping[str, Any] | None:
        """Return what the rank wrote, or a process that it had started."""
        try:
            error = json.loads(Path(self._envs[local_rank]["COMPOSER_ERROR_FILE"]).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return error if isinstance(error, dict) and "exception_type" in error else None

    def _ending(self, local_rank: int) -> Ending:
        """Return how a rank ended, or why it is about to."""
        env, error = self._envs[local_rank], self._own_error(local_rank)
        stop_time = self._stop_time or time.time()
        code, failed = self._exits.get(local_rank, (None, time.time()))
        was_stopped = code is None or (code < 0 and failed > stop_time)
        suspended_s = self._stopped.too_long.get(local_rank)
        if suspended_s is not None:
            code, failed, what = -signal.SIGSTOP, stop_time, f"was suspended by SIGSTOP for {suspended_s:.0f} s"
        elif error is not None and was_stopped:
            code, what = 1, "raised, but did not end"
        else:
            code = -signal.SIGKILL if code is None else code  # one that SIGKILL did not end is stuck in a driver
            what = _describe(code)
        if error is not None and suspended_s is None:
            failed = float(error["timestamp"])
        elif code > 0:
            error = self._error(local_rank)  # a process that the rank waited for may know more
        return Ending(
            rank=int(env["RANK"]),
            local_rank=local_rank,
            pid=self.pids[local_rank],
            exit_code=code,
            time=failed,
            by_itself=code != 0 and failed <= stop_time,
            has_exited=not was_stopped,
            what=what,
            error=error,
            stdout=self._context.stdouts[local_rank],
            stderr=self._context.stderrs[local_rank],
        )


class _Suspensions:
    """For how long processes have been suspended. A debugger's hold does not count."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._looked_at: float | None = None
        self._dwell_s: dict[int, float] = {}
        self.too_long: dict[int, float] = {}

    def look(self, pids: Mapping[int, int]) -> bool:
        """Look at the processes, not more often than needed, and say whether one is suspended for too long."""
        now = time.monotonic()
        if not self._timeout_s or (self._looked_at is not None and now - self._looked_at < _LOOK_AT_STATES_S):
            return bool(self.too_long)
        # A launcher that was itself suspended, as by `scontrol suspend`, has not seen how long the ranks were.
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, 2 * _LOOK_AT_STATES_S)
        self._looked_at = now
        for local_rank, pid in pids.items():
            if process_state(pid) != "T":
                self._dwell_s.pop(local_rank, None)
                continue
            self._dwell_s[local_rank] = self._dwell_s.get(local_rank, -passed) + passed
            if self._dwell_s[local_rank] >= self._timeout_s:
                self.too_long[local_rank] = self._dwell_s[local_rank]
        return bool(self.too_long)


def _open_pidfds(pids: Mapping[int, int]) -> dict[int, int]:
    """Return a descriptor of each process that is ready once it ends; none where the system does not have them."""
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
    """The signals of one launch.

    Args:
        names: Those to handle, separated by commas.
    """

    def __init__(self, names: str) -> None:
        self.followed: signal.Signals | None = None
        """The signal for which the ranks were asked to end."""
        self._handlers = _handlers(names)
        self._received: signal.Signals | None = None
        self._is_ending = False
        self._is_interruptible = False
        self._must_hurry = False

    @contextmanager
    def while_starting(self) -> Iterator[None]:
        """Have torch, which sets its handlers whenever it starts processes, do so for these signals."""
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
        """Keep signals from breaking off what ends the ranks.

        Args:
            followed: The signal for which they end, if that is why.
        """
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
        """Let SIGINT, also one that came a moment too early, raise `SignalException`."""
        self._is_interruptible = True
        try:
            if self._must_hurry:
                _raise(signal.SIGINT)
            yield
        finally:
            self._is_interruptible = False

    def catch_up(self) -> None:
        """Raise for a signal that came while ranks ended for another reason."""
        if self.followed is None and self._received is not None:
            _raise(self._received)

    def ignore(self) -> None:
        """Ignore them from now on."""
        for signum in self._handlers:
            signal.signal(signum, signal.SIG_IGN)

    def restore(self) -> None:
        """Handle them as before the launch."""
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
    """Return the handlers of now of those signals that this process is to handle.

    What it was started to ignore, as nohup and shells do for processes in the background, it goes on to ignore.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}  # Python lets no other thread set handlers
    handlers = {signal.Signals[name.strip()]: signal.SIG_DFL for name in names.split(",")}
    handlers = {signum: signal.getsignal(signum) or default for signum, default in handlers.items()}
    return {signum: handler for signum, handler in handlers.items() if handler != signal.SIG_IGN}
