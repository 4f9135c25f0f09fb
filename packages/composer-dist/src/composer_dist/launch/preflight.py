"""What can be known to fail before any process starts: no script, a port that is taken, a host without address."""

import errno
import logging
import os
import shutil
import socket
import time
from pathlib import Path

from composer_dist.launch.args import Options
from composer_dist.launch.topology import Topology

__all__ = ["check_command", "check_meeting_point"]

_log = logging.getLogger("composer_dist.launch")

_RESOLVE_TIMEOUT_S = 10.0  # a cluster's name server may learn of rank 0's host a little later than its nodes start


def check_command(options: Options) -> None:
    """Raise if there is nothing that could be started.

    Args:
        options: What was typed.

    Raises:
        ValueError: If the script or the program does not exist.
    """
    script = options.training_script
    if options.command_mode:
        if shutil.which(script) is None:
            raise ValueError(f"the command {script!r} does not exist or is not executable. Give a path or install it.")
        return
    if shutil.which(options.python) is None:
        raise ValueError(f"--python={options.python!r} does not exist or is not executable. Give an interpreter.")
    if not options.module_mode and not Path(script).exists():
        raise ValueError(
            f"the training script {script!r} does not exist in {os.getcwd()!r}. Give its path; for a module give "
            "-m as well, for a command -c."
        )


def check_meeting_point(topology: Topology) -> None:
    """Raise if the ranks could not meet.

    Args:
        topology: This node's place, with the address of rank 0.

    Raises:
        ValueError: If the host's name is unknown, or if this node runs rank 0 and the port is taken.
    """
    addr, port, sources = topology.master_addr, topology.master_port, topology.sources
    deadline = time.monotonic() + (_RESOLVE_TIMEOUT_S if topology.is_multi_node else 0)
    while (problem := _lookup_problem(addr, port)) is not None:
        if time.monotonic() >= deadline:
            raise ValueError(
                f"master_addr={addr!r} (from {sources['master_addr']}) cannot be resolved: {problem}. Give a host "
                "name or address that every node knows."
            )
        _log.info("master_addr=%r cannot be resolved yet: %s", addr, problem)
        time.sleep(0.5)
    if topology.base_rank == 0 and _is_taken(port):
        raise ValueError(
            f"master_port={port} (from {sources['master_port']}) is taken by another process of this machine. Give "
            "another --master_port"
            + (", the same on every node." if topology.is_multi_node else ", or none for one that is free.")
        )


def _lookup_problem(addr: str, port: int) -> str | None:
    try:
        socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return str(error)
    return None


def _is_taken(port: int) -> bool:
    """Say whether rank 0 could not listen on the port, which it does on all addresses."""
    for family, everywhere in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does: an old run does not count
            try:
                listener.bind((everywhere, port))
                listener.listen(1)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return True
    return False
