"""Creation of the process group of a distributed run."""

import atexit
import logging
import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import ref

import torch.distributed as tdist

from composer_dist import error_file
from composer_dist.devices import Device, get_device
from composer_dist.env import SINGLE_RANK, check_environment

if TYPE_CHECKING:
    from torch.distributed import (
        ProcessGroup,
        Store,  # pyright: ignore[reportPrivateImportUsage]  # documented there
    )

__all__ = ["DEFAULT_TIMEOUT_S", "initialize_dist", "get_timeout"]

# Composer's logger name, so that `python_log_level` of a Trainer applies.
_log = logging.getLogger("composer.utils.dist")

DEFAULT_TIMEOUT_S = 300.0
_REST_S, _LONGEST_REST_S = 0.01, 5.0

# With both backends a group carries tensors on either device, and objects without a copy to the GPU.
_BACKENDS_TO_MAKE = {"nccl": "cpu:gloo,cuda:nccl", "": "gloo"}
_DEVICE_TYPES = {"gloo": "cpu", "nccl": "cuda", "hccl": "hpu"}
_OTHER_WORLD_SIZES = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")

_timeout_s = DEFAULT_TIMEOUT_S


def initialize_dist(device: str | Device | None = None, timeout: float = DEFAULT_TIMEOUT_S) -> None:
    """Create the process group that all collectives of this process use. Every rank must call this.

    A process without a launcher gets a group of its own, without opening a port, and the five rank variables of a
    single process in its environment. If Slurm or Open MPI started several such tasks, a warning is logged. An existing
    group is kept if it has a backend for the device.

    Args:
        device: A name or a `Device`, which determines the backend. The GPU if there is one when `None`.
        timeout: Seconds until a rank gives up waiting for another.

    Raises:
        RuntimeError: If torch was built without its distributed package although several processes run, if the rank
            variables contradict each other, if the existing process group cannot serve this device, or if an XLA
            device is requested before `torch_xla` is imported.
    """
    global _timeout_s
    error_file.install()  # first, so that the launcher also sees the errors raised below
    device = get_device(device)
    if not tdist.is_available():
        world_size = os.environ.get("WORLD_SIZE", "1")
        if world_size != "1":
            raise RuntimeError(
                f"WORLD_SIZE={world_size!r}, but torch was built without its distributed package. Install a build that "
                "has it, or unset WORLD_SIZE to train in one process."
            )
        return
    _timeout_s = timeout
    if tdist.is_initialized():
        wanted, name = device.dist_backend or "gloo", tdist.get_backend()
        backends = dict(part.split(":", 1) for part in tdist.get_backend_config().split(",") if ":" in part)
        if name == wanted or backends.get(_DEVICE_TYPES.get(wanted, wanted)) == wanted:
            return
        raise RuntimeError(
            f"device={device.name!r} needs the backend {wanted!r}, but torch.distributed is initialized with {name!r}. "
            "A process group cannot change its backend: restart the process, and initialize with the one that is "
            "needed."
        )
    check_environment(os.environ)
    _warn_of_separate_runs(os.environ)
    _make_group(device, timedelta(seconds=timeout))
    group = tdist.group.WORLD
    assert group is not None
    atexit.register(_leave, ref(group))


def get_timeout() -> float:
    """Return the timeout of the ranks in seconds, as passed to `initialize_dist`."""
    return _timeout_s


def _warn_of_separate_runs(environ: Mapping[str, str]) -> None:
    """Log a warning if several processes were started that do not know their rank."""
    for variable in _OTHER_WORLD_SIZES:
        tasks = environ.get(variable, "")
        if "RANK" not in environ and tasks.isdecimal() and int(tasks) > 1:
            _log.warning(
                "%s=%r, but RANK is not set: each task that runs this trains a model of its own. To train one "
                "together, start one `composer` launcher on each node, or set RANK, WORLD_SIZE, LOCAL_RANK, "
                "LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT in every task.",
                variable,
                tasks,
            )


def _make_group(device: Device, timeout: timedelta) -> None:
    if device.dist_backend == "xla":
        if "torch_xla" not in sys.modules:
            raise RuntimeError(f"device={device.name!r}: import torch_xla before calling initialize_dist().")
        tdist.init_process_group("xla", init_method="xla://", timeout=timeout)
        return
    backend = _BACKENDS_TO_MAKE.get(device.dist_backend, device.dist_backend)
    # With a device, NCCL connects here and not inside the first step.
    eager = device.dist_backend == "nccl" and os.environ.get("COMPOSER_LAZY_NCCL") != "1"
    device_id = device.torch_device if eager else None
    store, rank, world_size = _store(timeout)
    tdist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device_id
    )


def _store(timeout: timedelta) -> "tuple[Store | None, int, int]":
    """Return the rendezvous store, this rank and the world size; `(None, -1, -1)` leaves all three to torch."""
    environ = os.environ
    if all(environ.get(variable, alone) == alone for variable, alone in SINGLE_RANK.items()):
        environ.update(SINGLE_RANK)
        return tdist.HashStore(), 0, 1  # pyright: ignore[reportPrivateImportUsage]  # documented there
    if "TORCHELASTIC_RUN_ID" in environ and all(variable in environ for variable in _RENDEZVOUS):
        return _attempt_store(environ, timeout), int(environ["RANK"]), int(environ["WORLD_SIZE"])
    return None, -1, -1


def _attempt_store(environ: Mapping[str, str], timeout: timedelta) -> "Store":
    """Return a store without entries of earlier attempts of the same run.

    After an elastic restart, the agent's store still has the addresses of processes that have ended.
    """
    # The two cases and their arguments are those of torch's own rendezvous through these variables.
    supervised = environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    client = tdist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  # documented there
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        int(environ["WORLD_SIZE"]),
        is_master=not supervised and environ["RANK"] == "0",
        timeout=timeout,
        multi_tenant=not supervised,
    )
    prefix = f"composer/{environ['TORCHELASTIC_RUN_ID']}/attempt_{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return tdist.PrefixStore(prefix, client)  # pyright: ignore[reportPrivateImportUsage]  # documented there


def _leave(made_here: "ref[ProcessGroup]") -> None:
    """Destroy the group at exit if it is still the one made here; some backends hang or abort otherwise."""
    if tdist.is_initialized() and tdist.group.WORLD is made_here():
        if tdist.get_world_size() > 1:
            _wait_for_gloo_threads()
        tdist.destroy_process_group()


def _wait_for_gloo_threads() -> None:
    """Wait until Gloo's threads have released the tensors of the last collectives.

    They do so shortly after a collective completes, and need Python for it: after Python's end they would abort the
    process (pytorch/pytorch#179291). Only the last reference to a group joins its threads, and a wrapped model holds
    one. A thread that has nothing left to do sleeps; on a busy machine it may have to wait for a processor first.
    """
    deadline = time.monotonic() + _LONGEST_REST_S
    num_idle = 0
    # Twice in a row, since a thread that waits for the GIL, which `sleep` releases, sleeps too.
    while num_idle < 2 and time.monotonic() < deadline:
        time.sleep(_REST_S)
        num_idle = 0 if any(_runs_gloo(thread) for thread in Path("/proc/self/task").glob("*")) else num_idle + 1


def _runs_gloo(thread: Path) -> bool:
    try:
        name, _, numbers = (thread / "stat").read_text().rpartition(")")
    except OSError:  # the thread has ended
        return False
    return "gloo_runloop" in name and not numbers.startswith(" S")
