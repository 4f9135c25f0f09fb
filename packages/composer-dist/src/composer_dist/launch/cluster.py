"""A node's place according to the variables of its cluster.

Each system is expected to start one launcher per node, which starts the ranks.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Environment = Mapping[str, str]
T = TypeVar("T", int, str)

_RANGES = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_HOSTS = rf"(?:[^\[\],\s]|{_RANGES})+"
_NODELIST = re.compile(rf"{_HOSTS}(?:,{_HOSTS})*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """A value and its source."""

    value: T
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _System:
    """The variables of a cluster's system, empty for a value that it does not provide."""

    num_nodes: str
    node_rank: str
    nproc: str = ""
    master_addr: str = ""
    master_port: str = ""
    local_rank: str = ""
    """A variable that is above 0 in a second launcher on a node."""
    command: str = ""
    """A command that starts one launcher on each node."""


# Slurm comes before MPI, whose processes it may start. MPI has no variable for the first node's address.
_SYSTEMS = {
    "training-operator": _System(
        num_nodes="PET_NNODES",
        node_rank="PET_NODE_RANK",
        nproc="PET_NPROC_PER_NODE",  # 'auto', 'gpu': one process per accelerator
        master_addr="PET_MASTER_ADDR",
        master_port="PET_MASTER_PORT",
    ),
    # An indexed Job or JobSet, in which the user sets the number of nodes and the first one's name.
    "kubernetes": _System(
        num_nodes="COMPOSER_NUM_NODES", node_rank="JOB_COMPLETION_INDEX", master_addr="COMPOSER_MASTER_ADDR"
    ),
    "slurm": _System(
        num_nodes="SLURM_NNODES",
        node_rank="SLURM_NODEID",
        nproc="SLURM_GPUS_ON_NODE",
        local_rank="SLURM_LOCALID",
        command="srun --ntasks-per-node=1 composer ...",
    ),
    "openmpi": _System(
        num_nodes="OMPI_COMM_WORLD_SIZE",
        node_rank="OMPI_COMM_WORLD_RANK",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        command="mpirun --map-by ppr:1:node composer ...",
    ),
    "pmi": _System(  # MPICH and Intel MPI
        num_nodes="PMI_SIZE", node_rank="PMI_RANK", local_rank="MPI_LOCALRANKID", command="mpiexec -ppn 1 composer ..."
    ),
}

CLUSTERS = tuple(_SYSTEMS)
"""The supported systems."""


class ClusterHints:
    """The values of a cluster, whose variables are read and validated only when a value is needed."""

    def __init__(self, cluster: str, environ: Environment) -> None:
        self._cluster, self._system, self._environ = cluster, _SYSTEMS[cluster], environ
        # Each launcher of a node would start all of its ranks.
        local_rank = environ.get(self._system.local_rank, "0")
        if local_rank not in ("", "0"):
            raise ValueError(
                f"{self._system.local_rank}={local_rank!r}: several launchers were started on this node, and each "
                f"would start all of its ranks. Start one on each node, `{self._system.command}`, or give --cluster "
                "none."
            )

    def num_nodes(self) -> Found[int]:
        """Return the number of nodes."""
        # A step of Slurm (`srun`) may have fewer nodes than the job.
        in_step = self._cluster == "slurm" and self._environ.get("SLURM_STEP_NUM_NODES")
        return self._integer("SLURM_STEP_NUM_NODES" if in_step else self._system.num_nodes)

    def node_rank(self) -> Found[int]:
        """Return the rank of this node."""
        return self._integer(self._system.node_rank)

    def nproc(self) -> Found[int] | None:
        """Return the number of processes on this node, if it is given as a number."""
        text = self._environ.get(self._system.nproc, "")
        return Found(int(text), self._system.nproc) if text.isdecimal() else None

    def master_addr(self) -> Found[str] | None:
        """Return the host of rank 0."""
        if self._cluster != "slurm":
            host = self._environ.get(self._system.master_addr)
            return Found(host, self._system.master_addr) if host else None
        in_step = self._environ.get("SLURM_STEP_NUM_NODES") and self._environ.get("SLURM_STEP_NODELIST")
        variable = "SLURM_STEP_NODELIST" if in_step else "SLURM_JOB_NODELIST"
        nodelist = self._environ.get(variable)
        return Found(expand_nodelist(nodelist)[0], f"first host of {variable}={nodelist!r}") if nodelist else None

    def master_port(self) -> Found[int] | None:
        """Return the port of rank 0, the same on every node."""
        job = self._environ.get("SLURM_JOB_ID", "")
        if self._cluster == "slurm" and job.isdecimal():
            # Computed from the job, so that concurrent jobs on a host rarely collide.
            return Found(20000 + int(job) % 20000, f"20000 + SLURM_JOB_ID={job!r} mod 20000")
        if self._cluster == "kubernetes":
            return Found(29500, "the default of --cluster kubernetes")  # torchrun's default
        return self._integer(self._system.master_port) if self._environ.get(self._system.master_port) else None

    def _integer(self, variable: str) -> Found[int]:
        text = self._environ[variable]
        if not text.isdecimal():
            raise ValueError(
                f"the environment variable {variable}={text!r} is not an integer of 0 or more. Set it to one, or give "
                "--cluster none and give this node's place as options."
            )
        return Found(int(text), variable)


def infer(cluster: str, environ: Environment) -> ClusterHints | None:
    """Return the values of a cluster, or `None` outside of one.

    Args:
        cluster: One of `CLUSTERS`; `'auto'` for the first whose variables are set; `'none'`.
        environ: The environment.

    Raises:
        ValueError: If the named cluster's variables are missing, or if several launchers were started on this node.
    """
    if cluster == "none":
        return None
    missing = {
        name: [variable for variable in (system.num_nodes, system.node_rank) if not environ.get(variable)]
        for name, system in _SYSTEMS.items()
    }
    if cluster == "auto":
        found = next((name for name in CLUSTERS if not missing[name]), None)
        return None if found is None else ClusterHints(found, environ)
    if missing[cluster]:
        system = _SYSTEMS[cluster]
        raise ValueError(
            f"--cluster={cluster!r} needs the environment variables {system.num_nodes}, {system.node_rank}, of which "
            f"{', '.join(missing[cluster])} is not set. Set it, or give --node_rank, --world_size, --master_addr and "
            "--master_port."
        )
    return ClusterHints(cluster, environ)


def expand_nodelist(nodelist: str) -> list[str]:
    """Return the hosts in Slurm's compressed node list: names with numbers and ranges in brackets.

    Raises:
        ValueError: If brackets do not match or contain anything else.

    Example:
        >>> expand_nodelist("n[01-03,7],login")
        ['n01', 'n02', 'n03', 'n7', 'login']
    """
    if not _NODELIST.fullmatch(nodelist):
        raise ValueError(
            f"the list of nodes {nodelist!r} is not one that Slurm writes, such as 'n[01-03,7],login'. Give "
            "--master_addr instead."
        )
    entries = re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", nodelist)
    return [host for entry in entries for host in _expand_entry(entry)]


def _expand_entry(entry: str) -> Iterator[str]:
    before, opening, rest = entry.partition("[")
    if not opening:
        yield entry
        return
    inside, _, after = rest.partition("]")
    # Each number is combined with every expansion of the rest.
    tails = list(_expand_entry(after))
    for part in inside.split(","):
        low, _, high = part.partition("-")
        for number in range(int(low), int(high or low) + 1):
            for tail in tails:
                yield f"{before}{number:0{len(low)}d}{tail}"  # leading zeros belong to the name
