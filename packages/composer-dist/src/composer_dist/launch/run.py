"""A launch on one node: starting the ranks, restarts, and the exit status."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as tdist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from composer_dist.launch.account import Account
from composer_dist.launch.args import (
    FAILURE_TIMEOUT_S,
    SIGNAL_TIMEOUT_S,
    CannotStartError,
    HangTimeouts,
    Options,
)
from composer_dist.launch.guardian import LAUNCH_ID, Guardian, new_launch_id
from composer_dist.launch.nodes import Nodes
from composer_dist.launch.output import Logs
from composer_dist.launch.report import brief, crash_report, is_on_console, root_cause, say, waited_for_another
from composer_dist.launch.topology import (
    FREE_PORT,
    Rendezvous,
    Topology,
    child_command,
    child_environments,
    common_environment,
    hook_environment,
)
from composer_dist.launch.watch import Watch
from composer_dist.launch.workers import Ending, Signals, Workers
from composer_dist.progress import VARIABLE as PROGRESS
from composer_dist.progress import Board, RankProgress

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # documented there

    from composer_dist.launch.health import HealthServer, Snapshot


def run(options: Options, topology: Topology) -> int:
    """Start the ranks of a node whose place is known, and return the exit status after all have ended."""
    topology, store = _serve_store(topology)  # kept until the end of this function, so that it outlives every rank
    connect = partial(_join_store, topology, store)
    with Launch(options) as launch:
        try:
            launch.start(child_environments(topology, options, os.environ), connect)
            launch.wait()
            launch.end()
        except SignalException as received:
            launch.end(received.sigval)
    return launch.status


def _serve_store(topology: Topology) -> tuple[Topology, "Store | None"]:
    """Serve the store of the rendezvous if this node runs rank 0; return the topology with its port.

    The port then belongs to this run before a rank starts, no rank waits for rank 0 to open it, and it stays open until
    the last rank has ended.
    """
    if topology.base_rank != 0:
        return topology, None
    source = topology.sources["master_port"]
    # A port that was free while options were parsed may be taken by now; 0 lets the system choose another.
    port = 0 if source == FREE_PORT else topology.master_port
    try:
        # The name is only for this process's own connection: the server listens on all addresses.
        store = tdist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  # documented there
            "localhost", port, is_master=True, wait_for_workers=False
        )
    except tdist.DistError as error:
        raise CannotStartError(
            f"cannot listen on master_port={port} (from {source}): {error}. Give another --master-port, the same "
            "on every node."
        ) from error
    return replace(topology, master_port=store.port), store


def _join_store(topology: Topology, served: "Store | None") -> "Store":
    """Return the store that the node of rank 0 serves."""
    return served or tdist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  # documented there
        topology.master_addr, topology.master_port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT
    )


class Launch:
    """The ranks of this node, from their start to the cleanup.

    Leaving the context kills the remaining processes, reports failures, and sets `status`.
    """

    def __init__(self, options: Options) -> None:
        self.status = 1
        self._options = options
        self._num_starts = 0
        self._closing = ExitStack()
        self._health: HealthServer | None = None
        if options.health_port is not None:  # first, since the port may be taken
            self._health = self._serve_health(options.health_host, options.health_port)
        self._failed = False
        self._has_failed_before = False
        self._leftovers: list[int] = []
        self._workers: Workers | None = None
        self._logs = Logs(options, os.environ)
        self._signals = Signals(options.signals_to_handle)
        self._guardian = Guardian(new_launch_id())
        self._watch = Watch(HangTimeouts.parse(options.hang_timeout), self._logs.folder)
        self._account = Account(self._guardian.launch_id)
        self.board: Board | None = None
        """The progress of the ranks, once they are started; a new one for each attempt."""

    def __enter__(self) -> "Launch":
        if self._health is not None:
            self._health.start()
            self._closing.callback(self._health.stop)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        is_signal = isinstance(error, SignalException)  # a signal during the start of the ranks
        try:
            self._signals.ignore()  # the cleanup is short and must complete
            self._close(failed=error is not None and not is_signal)
        finally:
            self._signals.restore()
        return is_signal

    def fail(self) -> None:
        """End all ranks because of a failure outside them."""
        self._failed = True
        self.end()

    @property
    def is_done(self) -> bool:
        """Return whether all ranks have ended."""
        return self._workers is not None and self._workers.are_done

    def leave_watch(self) -> None:
        """End the exchange with the other nodes, which then decide without this one whether a rank is stuck."""
        assert self._workers is not None
        self._watch.close(self._workers.exit_codes)

    def start(self, envs: dict[int, dict[str, str]], connect: "Callable[[], Store]") -> dict[int, int]:
        """Start the ranks, and return their processes.

        Args:
            envs: The variables of each local rank.
            connect: Returns the store that the launchers of all nodes share.
        """
        commands = {lr: child_command(self._options, {**os.environ, **env}) for lr, env in envs.items()}
        self._close_board()
        self._num_starts += 1
        self.board = Board(len(envs))  # new, since a process of the last attempt might still write
        for local_rank, env in envs.items():
            env[LAUNCH_ID] = self._guardian.launch_id
            env[PROGRESS] = self.board.slot(local_rank)
            env.update(hook_environment(self._options, os.environ))
            if not any(name in os.environ for name in _BUFFER_SIZES):
                env[_BUFFER_SIZES[0]] = _BUFFER_SIZE  # so that different collectives of the ranks can be named
        if self._workers is not None:
            self._workers.close()
        with self._signals.while_starting():
            self._workers = Workers(commands, envs, self._options, self._logs, self._guardian)
        for local_rank, pid in self._workers.pids.items():
            _log.info("Rank %s is PID %s: %s", envs[local_rank]["RANK"], pid, " ".join(commands[local_rank]))
        self._watch.begin(self.board, envs, self._workers.pids, self._meet_others(envs, connect))
        self._account.begin(self.board, envs)
        return self._workers.pids

    def _meet_others(self, envs: dict[int, dict[str, str]], connect: "Callable[[], Store]") -> Nodes | None:
        first = next(iter(envs.values()))
        ranks, world_size = [int(env["RANK"]) for env in envs.values()], int(first["WORLD_SIZE"])
        if world_size == len(ranks) or self._options.hang_timeout == "off":
            return None
        return Nodes(connect, ranks, world_size, first.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def wait(self) -> None:
        """Wait until all ranks have ended or one has failed."""
        while not self.has_failed() and not self.is_done:
            continue  # has_failed() sleeps

    def has_failed(self) -> bool:
        """Wait for an event or the monitor interval, and return whether a rank has failed."""
        assert self._workers is not None
        has_failed = self._workers.look(self._options.monitor_interval)
        if not has_failed and not self.is_done and (verdict := self._watch.look(self._workers.exit_codes)) is not None:
            has_failed = True
            self._workers.take_verdict(verdict)
        self._account.look()
        self._logs.flush()
        return has_failed

    def end(self, signum: signal.Signals | None = None) -> None:
        """End all ranks: wait for those that are finishing, send a signal, and then SIGKILL."""
        workers = self._workers
        if workers is None:
            self._signals.followed = signum
            return
        with self._signals.while_ending(signum):
            failures = self._find_failures(workers) if signum is None else []
            is_told = bool(failures) and is_on_console(failures[0])
            if is_told:  # one line, so that the rank's own output stays in view
                say(brief(failures[0], self._logs.root_log_dir))
            for ending in () if is_told else failures:
                what = f"crashed with exit code {ending.status}" if ending.has_exited else ending.what
                _log.error("Rank %s %s.", ending.rank, what)
            is_fine = workers.are_done and not failures and signum is None
            if not workers.are_done:
                self._ask_to_end(workers, signum, say if not is_told else _log.info)
            # First, since the copies of output end only when no process writes any more.
            self._leftovers += self._guardian.sweep(spare_detached=is_fine)
            self._logs.stop_copies()
            is_hang = workers.has_verdict
            is_stopped = not (failures or is_hang or is_fine)
            self._account.end(has_failed=bool(failures), is_hang=is_hang, is_stopped=is_stopped)
        if self._options.is_elastic:
            self._signals.catch_up()

    def _find_failures(self, workers: Workers) -> list[Ending]:
        """Return the ranks that failed; a rank for which the first of them waited comes first."""
        failures, exits = workers.failures(), workers.exit_codes
        if failures and not workers.has_verdict:
            waited = waited_for_another(failures[0]) or 0 in exits.values()
            failed = [ending.local_rank for ending in failures]
            verdict = self._watch.examine(exits, failed, waited=waited)
            if verdict is not None:
                workers.take_verdict(verdict)
                return workers.failures()
            if failures[0].exit_code == -signal.SIGABRT:
                said = self._watch.compare_with_aborted(failures[0].local_rank, exits, workers.error_of)
                if said is not None:
                    say(f"composer: error: {said}", "stderr")
        return failures

    def tell_failure(self) -> None:
        """Report the failure of an attempt that is followed by another one."""
        assert self._workers is not None
        failures = self._workers.failures()
        if failures:
            self._has_failed_before = True
            others = sorted(set(self._workers.ranks) - {ending.rank for ending in failures})
            said = root_cause(failures[0], others, self._logs.root_log_dir)
            say(said.removesuffix("\n"), "stderr")

    def _ask_to_end(self, workers: Workers, signum: signal.Signals | None, tell: Callable[[str], None]) -> None:
        timeout_s = self._options.shutdown_timeout
        if signum is None:
            timeout_s = FAILURE_TIMEOUT_S if timeout_s is None else timeout_s
        else:
            timeout_s = SIGNAL_TIMEOUT_S if timeout_s is None else timeout_s
            name = "Ctrl-C" if signum == signal.SIGINT else signum.name
            # On a terminal, a progress bar and the ^C are on the current line.
            start = "\n" if signum == signal.SIGINT and sys.stdout.isatty() else ""
            tell(f"{start}{name} received; terminating training processes.")
        tell(
            f"Waiting up to {timeout_s:g} seconds for all training processes to terminate. Press Ctrl-C to exit "
            "immediately."
        )
        try:
            with self._signals.while_interruptible():
                workers.stop(signum or signal.SIGTERM, timeout_s)
        except SignalException:
            say("Killing the training processes.")
            workers.kill()

    def _close(self, *, failed: bool) -> None:
        workers = self._workers
        failures = workers.failures() if workers else []
        if workers is not None:
            workers.close()
        self._set_status(failures, failed=failed)
        self._leftovers += self._guardian.sweep(spare_detached=self.status == 0)
        self._guardian.close()
        self._closing.close()
        self._watch.close(workers.exit_codes if workers else None)
        self._account.end(has_failed=self.status != 0)
        self._close_board()
        folder = self._logs.close(failed=self._has_failed_before or (self.status != 0 and workers is not None))
        if self._leftovers:
            _log.warning("Processes that the ranks had left behind were killed: %s.", sorted(set(self._leftovers)))
        if failures:
            self._report(failures, folder)
        elif folder is not None:
            level = logging.WARNING if self.status or self._has_failed_before else logging.INFO
            _log.log(level, "The logs are in %s", folder)

    def _set_status(self, failures: Sequence[Ending], *, failed: bool) -> None:
        if self._signals.followed is not None:
            self.status = 128 + self._signals.followed
        elif not (failed or self._failed):
            stopped = self._workers.status_of_stop if self._workers else 0
            self.status = failures[0].status if failures else stopped

    def _serve_health(self, host: str, port: int) -> "HealthServer":
        if not 0 < port < 2**16:
            raise CannotStartError(f"--health-port={port!r} must be a port, from 1 to 65535.")
        try:
            from composer_dist.launch.health import HealthServer  # prometheus-client, an extra
        except ImportError as error:
            raise CannotStartError(str(error)) from error
        return HealthServer(host, port, self._snapshot)

    def _snapshot(self) -> "Snapshot":
        """Return the state of the ranks, for a thread of the health server."""
        from composer_dist.launch.health import Snapshot  # as above

        board, workers, ranks, problem = self.board, self._workers, list[RankProgress](), None
        with suppress(ValueError):  # the board was closed meanwhile
            ranks = [] if board is None else board.read_all()
        if board is None or workers is None:
            problem = "The ranks are not running."
        elif workers.has_verdict or any(workers.exit_codes.values()):
            problem = "A rank has failed."
        elif self._watch.is_stalled(workers.exit_codes):
            problem = "No rank makes progress."
        return Snapshot(ranks, max(0, self._num_starts - 1), problem)

    def _close_board(self) -> None:
        if self.board is not None:
            self.board.close()
            self.board = None

    def _report(self, failures: Sequence[Ending], folder: str | None) -> None:
        assert self._workers is not None  # some have failed
        if is_on_console(failures[0]):
            return  # reported in one line already; more would hide the rank's output
        others = sorted(set(self._workers.ranks) - {ending.rank for ending in failures})
        say(crash_report(failures))
        say(root_cause(failures[0], others, folder).removesuffix("\n"), "stderr")


_log = logging.getLogger("composer_dist.launch")

# torch's variable for its flight recorder, and the earlier name; the size is torch's own for NCCL.
_BUFFER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_BUFFER_SIZE = "2000"
_STORE_TIMEOUT = timedelta(seconds=10)
_AGENT_INTERVAL_S = 0.001  # the waiting is done in `Launch.has_failed`


def run_elastic(options: Options, rendezvous: Rendezvous) -> int:
    """Run this node's ranks with restarts, and return the exit status of the last attempt."""
    with Launch(options) as launch:
        try:
            spec = _make_spec(options, rendezvous)
            _Agent(spec, launch, options).run()
            spec.rdzv_handler.shutdown()
        except SignalException as received:  # no shutdown of the rendezvous: the other nodes may continue
            launch.end(received.sigval)
        except RendezvousError as error:
            launch.fail()
            say(
                f"composer: error: the nodes did not meet at {rendezvous.endpoint} ({rendezvous.backend}, run "
                f"{rendezvous.run_id!r}): {type(error).__name__}: {error}",
                "stderr",
            )
    return launch.status


def _make_spec(options: Options, rendezvous: Rendezvous) -> WorkerSpec:
    try:
        parameters = RendezvousParameters(
            backend=rendezvous.backend,
            endpoint=rendezvous.endpoint,
            run_id=rendezvous.run_id,
            min_nodes=rendezvous.min_nodes,
            max_nodes=rendezvous.max_nodes,
            **rendezvous.config,
        )
        handler = get_rendezvous_handler(parameters)
    except (ValueError, TypeError) as error:  # torch validates the backend and its settings
        raise CannotStartError(
            f"--rdzv-backend={rendezvous.backend!r} with --rdzv-endpoint={rendezvous.endpoint!r} and "
            f"--rdzv-conf={dict(rendezvous.config)} is not valid: {error}. Correct the option that it names."
        ) from error
    return WorkerSpec(
        role="composer",
        local_world_size=rendezvous.nproc,
        rdzv_handler=handler,
        entrypoint=options.training_script,
        max_restarts=options.max_restarts,
        monitor_interval=_AGENT_INTERVAL_S,
    )


class _Agent(SimpleElasticAgent):
    """torch's elastic agent, which decides on starts and restarts, connected to a `Launch`.

    The methods below are the ones that torch documents for subclasses, despite their underscores.
    """

    def __init__(self, spec: WorkerSpec, launch: Launch, options: Options) -> None:
        super().__init__(spec)
        self._launch = launch
        self._options = options
        self._attempt = -1

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec, handler = worker_group.spec, worker_group.spec.rdzv_handler
        assert worker_group.store is not None  # set by the rendezvous
        assert worker_group.group_rank is not None
        assert worker_group.group_world_size is not None
        self._attempt = _agree(
            worker_group.store, worker_group.group_rank, worker_group.group_world_size, self._attempt + 1
        )
        common = common_environment(spec.local_world_size, self._options, os.environ) | {
            "WORLD_SIZE": str(worker_group.workers[0].world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "NODE_RANK": str(worker_group.group_rank),
            "GROUP_RANK": str(worker_group.group_rank),
            "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
            "MASTER_ADDR": str(worker_group.master_addr),
            "MASTER_PORT": str(worker_group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self._attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(handler.use_agent_store),
        }
        store = worker_group.store
        return self._launch.start(
            {
                worker.local_rank: common | {"RANK": str(worker.global_rank), "LOCAL_RANK": str(worker.local_rank)}
                for worker in worker_group.workers
            },
            lambda: store,
        )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._launch.has_failed():
            self._launch.end()
            if self._remaining_restarts > 0:
                self._launch.tell_failure()
                _log.warning("Attempt %s failed; starting all ranks again.", self._attempt)
            return RunResult(state=WorkerState.FAILED)
        if self._launch.is_done:
            self._launch.leave_watch()  # torch now waits for the other nodes, whose ranks may be stuck
            ranks = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=ranks)
        return RunResult(state=WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if not self._launch.is_done:
            self._launch.end()

    def _shutdown(self, *_: object, **__: object) -> None:
        """Do nothing: the launch ends its ranks itself."""


def _agree(store: "Store", node_rank: int, num_nodes: int, attempt: int) -> int:
    """Return an attempt number that is the same on all nodes and higher than all before.

    torch counts on each node separately. A node that fails counts one more than the nodes that see it return, and new
    nodes start at 0, but the ranks' rendezvous uses the attempt number.
    """
    store.set(f"composer/attempt/{node_rank}", str(attempt))
    return max(int(store.get(f"composer/attempt/{other}")) for other in range(num_nodes))
