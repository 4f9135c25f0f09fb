"""Runs the ranks of a node, from the first process to the exit status."""

import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as tdist
from torch.distributed.elastic.multiprocessing import SignalException

from composer_dist.launch.args import FAILURE_TIMEOUT_S, SIGNAL_TIMEOUT_S, Options
from composer_dist.launch.children import child_command, child_environments
from composer_dist.launch.guardian import LAUNCH_ID, Guardian
from composer_dist.launch.logs import Logs, new_run_id
from composer_dist.launch.report import crash_report, is_on_console, root_cause
from composer_dist.launch.topology import Topology
from composer_dist.launch.workers import Ending, Workers

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # documented there

__all__ = ["Launch", "run"]

_log = logging.getLogger("composer_dist.launch")


def run(options: Options, topology: Topology) -> int:
    """Start the ranks of a node whose place in the run is known, and return the exit status when all have ended.

    Args:
        options: What was typed.
        topology: Which ranks those are.
    """
    store = _serve_store(topology)
    with Launch(options, new_run_id()) as launch:
        try:
            launch.start(child_environments(topology, options, os.environ))
            launch.wait()
            launch.end()
        except SignalException as received:
            launch.end(received.sigval)
    del store  # it was there for longer than any rank
    return launch.status


def _serve_store(topology: Topology) -> "Store | None":
    """Listen where the ranks meet, if rank 0 is one of this node's.

    The port is then this run's before a rank starts, no rank waits for rank 0 to open it, and it stays open until the
    last rank has ended.
    """
    if topology.base_rank != 0:
        return None
    try:
        return tdist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  # documented there
            "localhost", topology.master_port, is_master=True, wait_for_workers=False
        )
    except tdist.DistError as error:
        source = topology.sources["master_port"]
        raise ValueError(
            f"master_port={topology.master_port} (from {source}) cannot be listened on: {error}. Give another "
            "--master_port, the same on every node."
        ) from error


class Launch:
    """The ranks of this node, with what must be done before and after them.

    Leaving the context kills whatever is left, says what there is to say about failures, and sets `status`.

    Args:
        options: What was typed.
        run_id: The name of the folder of the logs.
    """

    def __init__(self, options: Options, run_id: str) -> None:
        self.status = 1
        self._options = options
        self._failed = False
        self._signal: signal.Signals | None = None
        self._handlers = _handlers(options.signals_to_handle)
        self._workers: Workers | None = None
        self._logs = Logs(options, run_id, os.environ)
        self._guardian = Guardian(uuid.uuid4().hex)

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        self._ignore_signals()  # what is left to do is short, and must be done
        is_signal = isinstance(error, SignalException)  # one more, while an earlier one was being followed
        try:
            self._close(failed=error is not None and not is_signal)
        finally:
            for signum, handler in self._handlers.items():
                signal.signal(signum, handler)
        return is_signal

    def fail(self) -> None:
        """End all ranks for a failure that is none of theirs."""
        self._failed = True
        self.end()

    @property
    def is_done(self) -> bool:
        """Whether all ranks have ended."""
        return self._workers is not None and self._workers.are_done

    def start(self, envs: dict[int, dict[str, str]]) -> dict[int, int]:
        """Start the ranks, and return their processes.

        Args:
            envs: For each local rank, the variables that it has beside the launcher's.
        """
        for env in envs.values():
            env[LAUNCH_ID] = self._guardian.launch_id
        commands = {lr: child_command(self._options, {**os.environ, **env}) for lr, env in envs.items()}
        if self._workers is not None:
            self._workers.close()
        names = ",".join(signum.name for signum in self._handlers)
        with _environment("TORCHELASTIC_SIGNALS_TO_HANDLE", names):
            self._workers = Workers(commands, envs, self._options, self._logs, self._guardian)
        for local_rank, pid in self._workers.pids.items():
            _log.info("Rank %s is PID %s: %s", envs[local_rank]["RANK"], pid, " ".join(commands[local_rank]))
        return self._workers.pids

    def wait(self) -> None:
        """Wait until all ranks have ended or one has failed."""
        while not self.has_failed() and not self.is_done:
            continue  # has_failed waits

    def has_failed(self) -> bool:
        """Wait until something may have happened, and say whether a rank has failed."""
        assert self._workers is not None
        return self._workers.look(self._options.monitor_interval)

    def end(self, signum: signal.Signals | None = None) -> None:
        """See to it that all ranks end: by themselves, or by a signal, or by SIGKILL.

        Args:
            signum: What the launcher received, if that is why.
        """
        self._signal = signum
        workers = self._workers
        if workers is None:
            return
        for ending in workers.failures() if signum is None else ():
            say = _say if is_on_console(ending) else _log.error  # as in _report
            what = f"crashed with exit code {ending.status}" if ending.has_exited else ending.what
            say(f"Rank {ending.rank} {what}.")
        try:
            if not workers.are_done:
                self._ask_to_end(workers, signum)
        except SignalException:
            self._ignore_signals()
            _say("Killing the training processes.")
            workers.kill()
        finally:
            self._logs.stop_copies()

    def _ignore_signals(self) -> None:
        for signum in self._handlers:
            signal.signal(signum, signal.SIG_IGN)

    def _ask_to_end(self, workers: Workers, signum: signal.Signals | None) -> None:
        """Send the ranks a signal, and wait."""
        timeout_s = self._options.shutdown_timeout
        if signum is None:
            timeout_s = FAILURE_TIMEOUT_S if timeout_s is None else timeout_s
        else:
            timeout_s = SIGNAL_TIMEOUT_S if timeout_s is None else timeout_s
            name = "Ctrl-C" if signum == signal.SIGINT else signum.name
            _say(f"{name} received; terminating training processes.")
        _say(
            f"Waiting up to {timeout_s:g} seconds for all training processes to terminate. Press Ctrl-C to exit "
            "immediately."
        )
        workers.stop(signum or signal.SIGTERM, timeout_s)

    def _close(self, *, failed: bool) -> None:
        """Leave nothing behind, and say what happened."""
        workers = self._workers
        failures = workers.failures() if workers else []
        if workers is not None:
            workers.close()
        ranks = set(workers.ranks) if workers else set()
        if self._signal is not None:
            self.status = 128 + self._signal
        elif not (failed or self._failed):
            self.status = failures[0].status if failures else 0
        folder = self._logs.close(failed=self.status != 0 and workers is not None)
        leftovers = self._guardian.close(spare_detached=self.status == 0)
        if leftovers:
            _log.warning("Processes that the ranks had left behind were killed: %s.", leftovers)
        if failures:
            _report(failures, sorted(ranks - {ending.rank for ending in failures}), folder)
        elif folder is not None:
            _log.log(logging.WARNING if self.status else logging.INFO, "The logs are in %s", folder)


def _handlers(names: str) -> dict[signal.Signals, Any]:
    """Return the handlers of now of those signals that this process is to handle.

    What it was started to ignore, as nohup and shells do for processes in the background, it goes on to ignore.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}  # Python lets no other thread set handlers
    handlers = {signal.Signals[name.strip()]: signal.SIG_DFL for name in names.split(",")}
    handlers = {signum: signal.getsignal(signum) or default for signum, default in handlers.items()}
    return {signum: handler for signum, handler in handlers.items() if handler != signal.SIG_IGN}


def _report(failures: Sequence[Ending], others: Sequence[int], folder: str | None) -> None:
    """Say what is known about failed ranks, so that the root cause's traceback comes last."""
    _say(crash_report(failures))
    first = failures[0]
    stream = sys.stdout if is_on_console(first) else sys.stderr  # its traceback stays the end of stderr
    with suppress(OSError):
        stream.write(root_cause(first, others, folder))
        stream.flush()


def _say(text: str) -> None:
    """Write a line for the user to read at once."""
    with suppress(OSError):  # the console may be gone
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
