"""How the processes of a run meet: `initialize_dist` makes the process group, once."""

import atexit
import logging
import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
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

# The name that `python_log_level` of a Trainer reaches.
_log = logging.getLogger("composer.utils.dist")

DEFAULT_TIMEOUT_S = 300.0
_REST_AT_EXIT_S = 0.02

# A group of both backends carries tensors wherever they are, and pickles without a detour through the GPU.
_BACKENDS_TO_MAKE = {"nccl": "cpu:gloo,cuda:nccl", "": "gloo"}
_DEVICE_TYPES = {"gloo": "cpu", "nccl": "cuda", "hccl": "hpu"}
_OTHER_WORLD_SIZES = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")

_timeout_s = DEFAULT_TIMEOUT_S


def initialize_dist(device: str | Device | None = None, timeout: float = DEFAULT_TIMEOUT_S) -> None:
    """Make the process group that all collectives of this process use. Every rank must call this.

    A process that no launcher started gets a group of its own, without opening a port, and the five rank variables
    of a single process in its environment; if Slurm or Open MPI speak of several, a warning is logged. A group that
    exists already stays if it has a backend for the device.

    Args:
        device: A name, or a `Device`; it chooses the backend. The GPU where there is one when `None`.
        timeout: Seconds until a rank gives up waiting for another.

    Raises:
        RuntimeError: If torch was built without its distributed package although several processes run, if the rank
            variables contradict each other, if a process group exists that cannot serve this device, or if an XLA
            device is asked for before `torch_xla` is loaded.
    """
    global _timeout_s
    error_file.install()  # first of all, since what follows may raise
    device = get_device(device)
    if not tdist.is_available():
        _refuse_several_ranks()
        return
    _timeout_s = timeout
    if tdist.is_initialized():
        _check_backend(device)
        return
    check_environment(os.environ)
    _warn_of_separate_runs(os.environ)
    _make_group(device, timedelta(seconds=timeout))
    atexit.register(_leave, ref(_world()))


def get_timeout() -> float:
    """Return for how many seconds ranks wait for each other, as `initialize_dist` was told."""
    return _timeout_s


def _refuse_several_ranks() -> None:
    """Raise if the environment speaks of other ranks, which this build of torch cannot reach."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise RuntimeError(
            f"WORLD_SIZE={world_size!r}, but torch was built without its distributed package. Install a build that "
            "has it, or unset WORLD_SIZE to train in one process."
        )


def _warn_of_separate_runs(environ: Mapping[str, str]) -> None:
    """Log a warning if several processes were started, none of which knows its rank."""
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


def _check_backend(device: Device) -> None:
    """Raise if the process group that exists has no backend for the device."""
    wanted = device.dist_backend or "gloo"
    config, name = tdist.get_backend_config(), tdist.get_backend()
    backends = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    if name == wanted or backends.get(_DEVICE_TYPES.get(wanted, wanted)) == wanted:
        return
    raise RuntimeError(
        f"device={device.name!r} needs the backend {wanted!r}, but torch.distributed is initialized with {name!r}. A "
        "process group cannot change its backend: restart the process, and initialize with the one that is needed."
    )


def _make_group(device: Device, timeout: timedelta) -> None:
    """Make the process group by way of what the environment tells."""
    if device.dist_backend == "xla":
        if "torch_xla" not in sys.modules:
            raise RuntimeError(f"device={device.name!r}: import torch_xla before calling initialize_dist().")
        tdist.init_process_group("xla", init_method="xla://", timeout=timeout)
        return
    backend = _BACKENDS_TO_MAKE.get(device.dist_backend, device.dist_backend)
    # With the device known, NCCL connects now and not inside the first step.
    eager = device.dist_backend == "nccl" and os.environ.get("COMPOSER_LAZY_NCCL") != "1"
    device_id = device.torch_device if eager else None
    store, rank, world_size = _store(timeout)
    tdist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device_id
    )


def _store(timeout: timedelta) -> "tuple[Store | None, int, int]":
    """Return the store through which the ranks meet, this rank and their number; no store to let torch find all."""
    environ = os.environ
    if all(environ.get(variable, alone) == alone for variable, alone in SINGLE_RANK.items()):
        environ.update(SINGLE_RANK)
        return tdist.HashStore(), 0, 1  # pyright: ignore[reportPrivateImportUsage]  # documented there
    if "TORCHELASTIC_RUN_ID" in environ and all(variable in environ for variable in _RENDEZVOUS):
        return _attempt_store(environ, timeout), int(environ["RANK"]), int(environ["WORLD_SIZE"])
    return None, -1, -1


def _attempt_store(environ: Mapping[str, str], timeout: timedelta) -> "Store":
    """Return a store that holds nothing of earlier attempts of the same run.

    After an elastic restart the supervisor's store still has the addresses of processes that are gone.
    """
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


def _world() -> "ProcessGroup":
    """Return the group of all ranks."""
    group = tdist.group.WORLD
    assert group is not None
    return group


def _leave(made_here: "ref[ProcessGroup]") -> None:
    """Destroy the group at exit, if it is still the one that was made here; some backends hang or abort otherwise."""
    if tdist.is_initialized() and tdist.group.WORLD is made_here():
        if tdist.get_world_size() > 1:
            # Gloo's threads let go of the tensors of the last collective a little after it is said to be done, for
            # which they need Python; once it has ended, they abort the process (pytorch/pytorch#179291).
            time.sleep(_REST_AT_EXIT_S)
        tdist.destroy_process_group()
