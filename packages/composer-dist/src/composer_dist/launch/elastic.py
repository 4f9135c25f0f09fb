"""Runs ranks whose numbers a rendezvous gives out, and starts them again when one fails or a node comes or goes."""

import logging
import os
from typing import TYPE_CHECKING, Any

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

from composer_dist.launch.args import Options
from composer_dist.launch.children import common_environment
from composer_dist.launch.console import say
from composer_dist.launch.logs import new_run_id
from composer_dist.launch.preflight import CannotStartError
from composer_dist.launch.rendezvous import Rendezvous
from composer_dist.launch.run import Launch

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # documented there

__all__ = ["run_elastic"]

_log = logging.getLogger("composer_dist.launch")

_AGENT_INTERVAL_S = 0.001  # the launch itself waits for something to happen


def run_elastic(options: Options, rendezvous: Rendezvous) -> int:
    """Start this node's ranks as often as it takes, and return the exit status of the last attempt.

    Args:
        options: What was typed.
        rendezvous: Where the nodes meet.
    """
    with Launch(options, new_run_id()) as launch:
        try:
            spec = _make_spec(options, rendezvous)
            _Agent(spec, launch, options).run()
            spec.rdzv_handler.shutdown()
        except SignalException as received:  # the other nodes may go on without this one
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
    """Return what torch's agent must know."""
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
    except (ValueError, TypeError) as error:  # torch knows what the backend and its settings may be
        raise CannotStartError(
            f"--rdzv_backend={rendezvous.backend!r} with --rdzv_endpoint={rendezvous.endpoint!r} and "
            f"--rdzv_conf={dict(rendezvous.config)} cannot be followed: {error}. Correct what is named."
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
    """The decisions of torch's agent about when to start and restart, carried out by the launch.

    The methods below are the ones that torch documents for subclasses, underscores and all.
    """

    def __init__(self, spec: WorkerSpec, launch: Launch, options: Options) -> None:
        super().__init__(spec)
        self._launch = launch
        self._options = options
        self._attempt = -1

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec, handler = worker_group.spec, worker_group.spec.rdzv_handler
        assert worker_group.store is not None  # the rendezvous has just set it
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
        return self._launch.start(
            {
                worker.local_rank: common | {"RANK": str(worker.global_rank), "LOCAL_RANK": str(worker.local_rank)}
                for worker in worker_group.workers
            }
        )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._launch.has_failed():
            self._launch.end()
            if self._remaining_restarts > 0:
                self._launch.tell_failure()
                _log.warning("Attempt %s failed; starting all ranks again.", self._attempt)
            return RunResult(state=WorkerState.FAILED)
        if self._launch.is_done:
            ranks = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=ranks)
        return RunResult(state=WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if not self._launch.is_done:
            self._launch.end()

    def _shutdown(self, *_: object, **__: object) -> None:
        """Do nothing: the launch ends its ranks itself, and knows whether that is for a signal."""


def _agree(store: "Store", node_rank: int, num_nodes: int, attempt: int) -> int:
    """Return the number of an attempt, higher than any that one of the nodes has seen.

    torch counts on each node by itself. There a node that has failed counts one more than a node that only sees the
    first one come back, and newcomers begin with 0; but the ranks meet under the attempt's number.
    """
    store.set(f"composer/attempt/{node_rank}", str(attempt))
    return max(int(store.get(f"composer/attempt/{other}")) for other in range(num_nodes))
