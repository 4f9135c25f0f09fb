"""Checks before any process starts: a missing script, a port that is taken, a host without an address."""

import errno
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from composer_dist.launch.args import Options
from composer_dist.launch.topology import FREE_PORT, Topology

_RUN_NAMES = ("COMPOSER_RUN_NAME", "RUN_NAME", "SLURM_JOB_ID")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Settings of torch's rendezvous."""

    nproc: int
    min_nodes: int
    max_nodes: int
    backend: str
    endpoint: str
    run_id: str
    config: Mapping[str, str]


def resolve_rendezvous(
    options: Options, nproc: int, topology: Topology | None, environ: Mapping[str, str]
) -> Rendezvous:
    """Return the settings of the rendezvous from options, topology and environment.

    Raises:
        ValueError: If the number of nodes is unknown, or a setting is not a pair.
    """
    nnodes = options.nnodes  # N or MIN:MAX
    if nnodes is None:
        assert topology is not None
        if topology.world_size % topology.nproc:  # the nodes are not alike
            raise ValueError(
                f"--max_restarts needs the number of nodes, which world_size={topology.world_size} and nproc="
                f"{topology.nproc} do not determine. Give --nnodes and --rdzv_endpoint instead of --world_size."
            )
        nnodes = str(topology.world_size // topology.nproc)
    low, _, high = nnodes.partition(":")
    min_nodes, max_nodes = int(low), int(high or low)
    config = _parse_config(options.rdzv_conf)
    endpoint = options.rdzv_endpoint
    if endpoint is None and topology is not None and topology.has_meeting_point:
        endpoint = f"{topology.master_addr}:{topology.master_port}"
        # Node 0 serves the store, unless --rdzv_conf decides otherwise.
        config = {"is_host": str(topology.node_rank == 0).lower()} | config
    if endpoint is None and max_nodes > 1:
        raise ValueError(
            f"--nnodes={options.nnodes!r} nodes must know where they meet. Give --rdzv_endpoint HOST:PORT, the same on "
            "every node, where HOST is one of them."
        )
    return Rendezvous(
        nproc=nproc,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        backend=options.rdzv_backend,
        endpoint=endpoint or "localhost:0",
        run_id=options.rdzv_id or _default_run_id(environ, max_nodes),
        config=config,
    )


def _default_run_id(environ: Mapping[str, str], max_nodes: int) -> str:
    named = next((environ[name] for name in _RUN_NAMES if environ.get(name)), None)
    return named or ("composer" if max_nodes > 1 else uuid.uuid4().hex)


def _parse_config(text: str) -> dict[str, str]:
    config: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ValueError(f"--rdzv_conf={text!r}: {pair!r} is not KEY=VALUE. Separate several with commas.")
        config[key.strip()] = value.strip()
    return config


_log = logging.getLogger("composer_dist.launch")

_RESOLVE_TIMEOUT_S = 10.0  # a cluster may register rank 0's host a little after its nodes start


class CannotStartError(ValueError):
    """The ranks cannot be started as requested."""


def check_command(options: Options) -> None:
    """Raise if the command of the ranks does not exist."""
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
    """Raise if the ranks cannot meet at the address and port of rank 0."""
    addr, source = topology.master_addr, topology.sources["master_addr"]
    _wait_for_address(f"master_addr={addr!r} (from {source})", addr, topology.is_multi_node)
    if topology.base_rank != 0:
        return
    if not _is_here(addr, topology.master_port):
        message = (
            f"master_addr={addr!r} (from {source}) is not an address of this machine, where rank 0 runs. Give one of "
            "its addresses"
        )
        if not topology.is_multi_node:
            raise ValueError(f"{message}, or omit it for 127.0.0.1.")
        _log.warning("%s, unless connections to that one are forwarded to this machine.", message)
    port, source = topology.master_port, topology.sources["master_port"]
    if source == FREE_PORT:  # chosen again at the start
        return
    # Rank 0 listens on all addresses, as torch does.
    for family, everywhere in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        if _bind_error(family, everywhere, port) == errno.EADDRINUSE:
            raise ValueError(
                f"master_port={port} (from {source}) is taken by another process of this machine. Give another "
                f"--master_port, {'the same on every node' if topology.is_multi_node else 'or none for a free one'}."
            )


def check_rendezvous(rendezvous: Rendezvous) -> None:
    """Raise if the nodes cannot meet at the rendezvous."""
    if rendezvous.backend not in ("c10d", "static") or rendezvous.config.get("store_type") == "file":
        return  # the endpoint need not be a host
    host, _, _ = rendezvous.endpoint.rpartition(":") if ":" in rendezvous.endpoint else (rendezvous.endpoint, "", "")
    host = host.strip("[]")  # an IPv6 address
    if host:
        _wait_for_address(f"--rdzv_endpoint={rendezvous.endpoint!r}", host, rendezvous.max_nodes > 1)


def _wait_for_address(what: str, host: str, is_multi_node: bool) -> None:
    """Raise if a host has no address; with several nodes, only after some time."""
    deadline = time.monotonic() + (_RESOLVE_TIMEOUT_S if is_multi_node else 0)
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"{what} cannot be resolved: {error}. Give a host name or address that every node knows."
                ) from error
            _log.info("%s cannot be resolved yet: %s", what, error)
        time.sleep(0.5)


def _is_here(addr: str, port: int) -> bool:
    found = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM)
    # Only an address of this machine can be bound.
    return any(_bind_error(family, str(address[0]), 0) != errno.EADDRNOTAVAIL for family, *_, address in found)


def _bind_error(family: int, addr: str, port: int) -> int | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
            listener.bind((addr, port))
            listener.listen(1)
    except OSError as error:
        return error.errno
    return None
