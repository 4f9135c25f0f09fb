"""Rank and world size of this process.

Inside a process group, torch knows rank and world size, and the environment must not contradict it. The position
within the node comes from the variables that the `composer` launcher sets, or else from those of torchrun, Slurm or
Open MPI. The latter count only if `RANK` or a process group shows that this process is part of a run, since Slurm
sets its variables for independent tasks as well.

This module does not import torch: an existing process group is found through the loaded `torch.distributed`.
"""

import os
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "MissingEnvironmentError",
    "get_world_size",
    "get_global_rank",
    "get_local_world_size",
    "get_local_rank",
    "get_node_rank",
    "check_environment",
    "get_free_tcp_port",
]

SINGLE_RANK = {"NODE_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
"""The five rank variables of a single process."""

_TORCH_ACCESSORS = {"WORLD_SIZE": "get_world_size", "RANK": "get_rank"}
_OTHER_LAUNCHERS = {
    "LOCAL_WORLD_SIZE": ("SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "LOCAL_RANK": ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "NODE_RANK": ("GROUP_RANK", "SLURM_NODEID"),  # GROUP_RANK is torchrun's name
}


class MissingEnvironmentError(Exception):
    """A process group exists, but no variable gives this process's place in its node."""


def get_world_size() -> int:
    """Return the number of processes that train together; 1 by default.

    Raises:
        RuntimeError: If `WORLD_SIZE` contradicts the process group.
        ValueError: If `WORLD_SIZE` is not an integer.
    """
    return _number("WORLD_SIZE")


def get_global_rank(group: "ProcessGroup | None" = None) -> int:
    """Return this process's rank among all processes, or inside `group`.

    Args:
        group: A process group; the result is -1 if this process is not a member.

    Raises:
        RuntimeError: If `RANK` contradicts the process group.
        ValueError: If `RANK` is not an integer.
    """
    if group is not None:
        return sys.modules["torch.distributed"].get_rank(group)  # a group exists, so torch is loaded
    return _number("RANK")


def get_local_world_size() -> int:
    """Return the number of processes on this node; 1 by default.

    Raises:
        MissingEnvironmentError: If a process group exists and no variable gives the number.
        ValueError: If `LOCAL_WORLD_SIZE` is not an integer.
    """
    return _number("LOCAL_WORLD_SIZE")


def get_local_rank() -> int:
    """Return this process's rank within its node; 0 by default.

    Raises:
        MissingEnvironmentError: If a process group exists and no variable gives the number.
        ValueError: If `LOCAL_RANK` is not an integer.
    """
    return _number("LOCAL_RANK")


def get_node_rank() -> int:
    """Return the rank of this process's node; 0 by default.

    Raises:
        MissingEnvironmentError: If a process group exists and no variable gives the number.
        ValueError: If `NODE_RANK` is not an integer.
    """
    return _number("NODE_RANK")


def check_environment(environ: Mapping[str, str]) -> None:
    """Validate the rank variables, before a process waits for ranks that cannot exist."""
    known = {variable: _integer(variable, environ[variable]) for variable in SINGLE_RANK if variable in environ}
    if known.get("RANK", 0) > 0 and "WORLD_SIZE" not in known:
        raise RuntimeError(
            f"the environment variable RANK={environ['RANK']!r} means that this is one of several processes, but "
            "WORLD_SIZE is not set. Set it to their number in every process, or unset RANK to train in a single one."
        )
    if known.get("WORLD_SIZE", 1) < 1:
        raise RuntimeError(
            f"the environment variable WORLD_SIZE={environ['WORLD_SIZE']!r} must be 1 or more. Set it to the number "
            "of processes, or unset it to train in a single process."
        )
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in known and size in known and not 0 <= known[rank] < known[size]:
            raise RuntimeError(
                f"the environment variables {rank}={environ[rank]!r} and {size}={environ[size]!r} contradict each "
                f"other: {rank} counts from 0 to {size} - 1. Start the processes with the `composer` launcher or with "
                "torchrun, or set both in every process."
            )
    if known.get("LOCAL_WORLD_SIZE", 1) > known.get("WORLD_SIZE", known.get("LOCAL_WORLD_SIZE", 1)):
        raise RuntimeError(
            f"the environment variables LOCAL_WORLD_SIZE={environ['LOCAL_WORLD_SIZE']!r} and "
            f"WORLD_SIZE={environ['WORLD_SIZE']!r} contradict each other: a node cannot have more ranks than the whole "
            "run. WORLD_SIZE is the number of processes on all nodes together."
        )


def _number(variable: str) -> int:
    """Return a rank variable's value from torch, the environment or other launchers, in this order."""
    tdist = sys.modules.get("torch.distributed")  # otherwise no process group can exist
    if tdist is not None and not tdist.is_available():
        return int(SINGLE_RANK[variable])
    # A variable that changed after the group was made must not go unnoticed.
    initialized = tdist is not None and tdist.is_initialized()
    text = os.environ.get(variable)
    if initialized and variable in _TORCH_ACCESSORS:
        number = getattr(tdist, _TORCH_ACCESSORS[variable])()
        if text is not None and _integer(variable, text) != number:
            raise RuntimeError(
                f"{variable}={text!r} in the environment contradicts torch.distributed, which says {number}. Unset "
                f"{variable}, or set it to {number} before the process group is made."
            )
        return number
    if text is not None:
        return _integer(variable, text)
    # Without RANK the world size is 1, and a local rank above 0 would contradict that.
    from_others = _from_other_launchers(variable) if initialized or "RANK" in os.environ else None
    if from_others is not None:
        return from_others
    if initialized:
        raise MissingEnvironmentError(
            f"torch.distributed is initialized, but the environment variable {variable} is not set. Start the "
            "processes with the `composer` launcher or with torchrun, or set it in every process."
        )
    return int(SINGLE_RANK[variable])


def _integer(variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"the environment variable {variable}={text!r} is not an integer. Set it to one, or unset it to train in "
            "a single process."
        ) from None


def _from_other_launchers(variable: str) -> int | None:
    for name in _OTHER_LAUNCHERS.get(variable, ()):
        text = os.environ.get(name, "")
        if text.isdecimal():  # Slurm also writes '4(x2)', which does not describe a single node
            return int(text)
    rank, ranks_per_node = os.environ.get("RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    # Ranks are numbered node by node.
    if variable == "NODE_RANK" and rank.isdecimal() and ranks_per_node.isdecimal() and int(ranks_per_node) > 0:
        return int(rank) // int(ranks_per_node)
    return None


def get_free_tcp_port() -> int:
    """Return a TCP port that is free on this machine.

    The port is not reserved: another process may take it first. If possible, listen on port 0 instead and read back the
    port that the system chose.

    Example:
        >>> 0 < get_free_tcp_port() < 65536
        True
    """
    with socket.socket() as listener:
        listener.bind(("", 0))  # all addresses, since the caller may listen on any
        return listener.getsockname()[1]
