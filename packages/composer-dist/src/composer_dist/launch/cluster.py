"""A node's place according to the variables of its cluster.

Each system is expected to start one launcher per node, which starts the ranks.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["CLUSTERS", "ClusterHints", "Found", "expand_nodelist", "infer"]

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


def _says_nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterHints:
    """A cluster's values as functions: variables are read, and may raise, only when a value is needed.

    A function returns `None` if the cluster does not provide its value.
    """

    cluster: str
    num_nodes: Callable[[], Found[int]]
    node_rank: Callable[[], Found[int]]
    nproc: Callable[[], Found[int] | None] = _says_nothing
    master_addr: Callable[[], Found[str] | None] = _says_nothing
    master_port: Callable[[], Found[int] | None] = _says_nothing


def infer(cluster: str, environ: Environment) -> ClusterHints | None:
    """Return the values of a cluster, or `None` outside of one.

    Args:
        cluster: One of `CLUSTERS`; `'auto'` for the first whose variables are set; `'none'`.
        environ: The environment.

    Raises:
        ValueError: If the named cluster's variables are missing, or if several launchers were started on this node.
            The returned functions raise it if a variable is not a number.
    """
    if cluster == "none":
        return None
    if cluster == "auto":  # the order of _SYSTEMS decides if several match
        return next((read(environ) for needs, read in _SYSTEMS.values() if all(map(environ.get, needs))), None)
    needs, read = _SYSTEMS[cluster]
    missing = [variable for variable in needs if not environ.get(variable)]
    if missing:
        raise ValueError(
            f"--cluster={cluster!r} needs the environment variables {', '.join(needs)}, of which {', '.join(missing)} "
            "is not set. Set it, or give --node_rank, --world_size, --master_addr and --master_port."
        )
    return read(environ)


def expand_nodelist(nodelist: str) -> list[str]:
    """Return the hosts in Slurm's compressed node list.

    Args:
        nodelist: Names separated by commas, with numbers and ranges in brackets.

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
    """Yield the hosts of one entry, which may have several brackets."""
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


def _slurm(environ: Environment) -> ClusterHints:
    """Read Slurm's variables: one launcher per node of a step, `srun --ntasks-per-node=1`."""
    _refuse_second_launcher(environ, "SLURM_LOCALID", "srun --ntasks-per-node=1 composer ...")
    # A step (`srun`) may have fewer nodes than the job.
    in_step = bool(environ.get("SLURM_STEP_NUM_NODES"))
    nodes = "SLURM_STEP_NUM_NODES" if in_step else "SLURM_NNODES"
    hosts = "SLURM_STEP_NODELIST" if in_step and environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    job = environ.get("SLURM_JOB_ID", "")

    def master_addr() -> Found[str] | None:
        nodelist = environ.get(hosts)
        return Found(expand_nodelist(nodelist)[0], f"first host of {hosts}={nodelist!r}") if nodelist else None

    # Every node computes the same port from the job, so that concurrent jobs on a host rarely collide.
    port = Found(20000 + int(job) % 20000, f"20000 + SLURM_JOB_ID={job!r} mod 20000") if job.isdecimal() else None
    return ClusterHints(
        cluster="slurm",
        num_nodes=lambda: _integer(environ, nodes),
        node_rank=lambda: _integer(environ, "SLURM_NODEID"),
        nproc=lambda: _plain_integer(environ, "SLURM_GPUS_ON_NODE"),
        master_addr=master_addr,
        master_port=lambda: port,
    )


def _kubernetes(environ: Environment) -> ClusterHints:
    """Read the variables of an indexed Job or JobSet; the user sets the number of nodes and the first one's name."""
    return ClusterHints(
        cluster="kubernetes",
        num_nodes=lambda: _integer(environ, "COMPOSER_NUM_NODES"),
        node_rank=lambda: _integer(environ, "JOB_COMPLETION_INDEX"),
        master_addr=lambda: _text(environ, "COMPOSER_MASTER_ADDR"),
        master_port=lambda: Found(29500, "the default of --cluster kubernetes"),  # torchrun's default
    )


def _training_operator(environ: Environment) -> ClusterHints:
    """Read the variables that training operators set for torchrun."""
    return ClusterHints(
        cluster="training-operator",
        num_nodes=lambda: _integer(environ, "PET_NNODES"),
        node_rank=lambda: _integer(environ, "PET_NODE_RANK"),
        nproc=lambda: _plain_integer(environ, "PET_NPROC_PER_NODE"),  # 'auto', 'gpu': one process per accelerator
        master_addr=lambda: _text(environ, "PET_MASTER_ADDR"),
        master_port=lambda: _integer(environ, "PET_MASTER_PORT") if environ.get("PET_MASTER_PORT") else None,
    )


def _openmpi(environ: Environment) -> ClusterHints:
    """Read Open MPI's variables: one launcher per node; the first node's address is not among them."""
    _refuse_second_launcher(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "mpirun --map-by ppr:1:node composer ...")
    return ClusterHints(
        cluster="openmpi",
        num_nodes=lambda: _integer(environ, "OMPI_COMM_WORLD_SIZE"),
        node_rank=lambda: _integer(environ, "OMPI_COMM_WORLD_RANK"),
    )


def _pmi(environ: Environment) -> ClusterHints:
    """Read the variables of MPICH and Intel MPI: one launcher per node; the first node's address is not among them."""
    _refuse_second_launcher(environ, "MPI_LOCALRANKID", "mpiexec -ppn 1 composer ...")
    return ClusterHints(
        cluster="pmi", num_nodes=lambda: _integer(environ, "PMI_SIZE"), node_rank=lambda: _integer(environ, "PMI_RANK")
    )


# Required variables and reader of each system. Slurm comes before MPI, whose processes it may start.
_SYSTEMS: dict[str, tuple[tuple[str, ...], Callable[[Environment], ClusterHints]]] = {
    "training-operator": (("PET_NNODES", "PET_NODE_RANK"), _training_operator),
    "kubernetes": (("COMPOSER_NUM_NODES", "JOB_COMPLETION_INDEX"), _kubernetes),
    "slurm": (("SLURM_NNODES", "SLURM_NODEID"), _slurm),
    "openmpi": (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), _openmpi),
    "pmi": (("PMI_SIZE", "PMI_RANK"), _pmi),
}

CLUSTERS = tuple(_SYSTEMS)
"""The supported systems."""


def _refuse_second_launcher(environ: Environment, variable: str, command: str) -> None:
    """Raise if this is not the node's first launcher, since each one would start all ranks of the node."""
    if environ.get(variable, "0") not in ("", "0"):
        raise ValueError(
            f"{variable}={environ[variable]!r}: several launchers were started on this node, and each would start all "
            f"of its ranks. Start one on each node, `{command}`, or give --cluster none."
        )


def _integer(environ: Environment, variable: str) -> Found[int]:
    """Return a variable that must be a number."""
    text = environ[variable]
    if not text.isdecimal():
        raise ValueError(
            f"the environment variable {variable}={text!r} is not an integer of 0 or more. Set it to one, or give "
            "--cluster none and give this node's place as options."
        )
    return Found(int(text), variable)


def _plain_integer(environ: Environment, variable: str) -> Found[int] | None:
    """Return a variable if it is a number."""
    text = environ.get(variable, "")
    return Found(int(text), variable) if text.isdecimal() else None


def _text(environ: Environment, variable: str) -> Found[str] | None:
    """Return a variable if it is set."""
    text = environ.get(variable)
    return Found(text, variable) if text else None
