"""Where the nodes of an elastic run meet, and how many must come: a pure function of options and environment."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from composer_dist.launch.args import Options
from composer_dist.launch.topology import Topology

__all__ = ["Rendezvous", "resolve_rendezvous"]

_RUN_NAMES = ("COMPOSER_RUN_NAME", "RUN_NAME", "SLURM_JOB_ID")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """What torch's rendezvous is told."""

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
    """Return where and with how many nodes the run begins.

    Args:
        options: What was typed.
        nproc: Processes on this node.
        topology: This node's place if the number of nodes does not change, else `None`.
        environ: The launcher's environment.

    Raises:
        ValueError: If the nodes cannot be counted, or a setting is not a pair.
    """
    low, _, high = (options.nnodes or str(_num_nodes(topology))).partition(":")
    min_nodes, max_nodes = int(low), int(high or low)
    config = _parse_config(options.rdzv_conf)
    endpoint = options.rdzv_endpoint
    if endpoint is None and topology is not None and topology.has_meeting_point:
        endpoint = f"{topology.master_addr}:{topology.master_port}"
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


def _num_nodes(topology: Topology | None) -> int:
    """Return how many nodes like this one make up the world."""
    assert topology is not None  # without --nnodes
    if topology.world_size % topology.nproc:
        raise ValueError(
            f"--max_restarts needs the number of nodes, which world_size={topology.world_size} and nproc="
            f"{topology.nproc} do not tell. Give --nnodes and --rdzv_endpoint instead of --world_size."
        )
    return topology.world_size // topology.nproc


def _default_run_id(environ: Mapping[str, str], max_nodes: int) -> str:
    """Return a name that every node comes upon by itself; a random one where there is only one."""
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
