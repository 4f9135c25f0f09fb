"""Ranks of this node and the rendezvous of all ranks, from options, environment, and the variables of a cluster.

Each cluster is expected to start one launcher per node, which starts the ranks.
"""

import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from composer_dist.env import get_free_tcp_port
from composer_dist.launch.args import CLUSTERS, PLACEHOLDERS, RUNS, Options, option
from composer_dist.launch.guardian import LAUNCH_ID, is_within

_log = logging.getLogger("composer_dist.launch")

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


# In the order of `CLUSTERS`. MPI has no variable for the first node's address.
_SYSTEMS = {
    "skypilot": _System(
        num_nodes="SKYPILOT_NUM_NODES",
        node_rank="SKYPILOT_NODE_RANK",
        nproc="SKYPILOT_NUM_GPUS_PER_NODE",
        master_addr="SKYPILOT_NODE_IPS",  # one address per line, in the order of the ranks
    ),
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
            hosts = self._environ.get(self._system.master_addr, "").split()
            return Found(hosts[0], self._system.master_addr) if hosts else None
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
        if self._cluster in ("kubernetes", "skypilot"):
            return Found(29500, f"the default of --cluster {self._cluster}")  # torchrun's default
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
    """Return the values of a cluster, or `None` outside of one."""
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
            f"{', '.join(missing[cluster])} is not set. Set it, or give --node-rank, --world-size, --master-addr and "
            "--master-port."
        )
    return ClusterHints(cluster, environ)


def expand_nodelist(nodelist: str) -> list[str]:
    """Return the hosts in Slurm's compressed node list: names with numbers and ranges in brackets.

    Example:
        >>> expand_nodelist("n[01-03,7],login")
        ['n01', 'n02', 'n03', 'n7', 'login']
    """
    if not _NODELIST.fullmatch(nodelist):
        raise ValueError(
            f"the list of nodes {nodelist!r} is not one that Slurm writes, such as 'n[01-03,7],login'. Give "
            "--master-addr instead."
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


FREE_PORT = "a free port"
"""The source of a port that was chosen by this launcher."""
_SINGLE_NODE = "single node"
_OF_LAUNCHERS = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The place of this node in the run."""

    nproc: int
    world_size: int
    base_rank: int
    node_rank: int
    master_addr: str
    master_port: int
    sources: Mapping[str, str]
    """The source of each value above, by name."""

    @property
    def is_multi_node(self) -> bool:
        """Return whether some ranks run on other nodes."""
        return self.world_size > self.nproc

    @property
    def has_meeting_point(self) -> bool:
        """Return whether an address or a port of rank 0 was given."""
        return (self.sources["master_addr"], self.sources["master_port"]) != (_SINGLE_NODE, FREE_PORT)


def resolve(options: Options, environ: Mapping[str, str], nproc: Found[int]) -> Topology:
    """Return this node's place from options, environment and cluster, in this order."""
    inputs = _Inputs(options, environ)
    world_size = _world_size(inputs, nproc)
    if world_size.value > nproc.value:
        base_rank, node_rank = _ranks_of_one_node(inputs, nproc, world_size)
        master_addr, master_port = _meeting_point(inputs, world_size, nproc)
    else:
        base_rank = node_rank = Found(0, _SINGLE_NODE)
        for name in ("base_rank", "node_rank"):
            value = inputs.integer(name)
            if value is not None and value.value != 0:
                raise ValueError(
                    f"{name}={value.value} (from {value.source}), but the ranks of this node are all there are, and "
                    f"start with 0. Give --world-size if there are other nodes, or remove {value.source}."
                )
        master_addr = inputs.text("master_addr") or Found("127.0.0.1", _SINGLE_NODE)
        # A free port may be taken before the run starts, so it is chosen again then.
        master_port = inputs.integer("master_port") or Found(get_free_tcp_port(), FREE_PORT)
    if not 0 < master_port.value < 65536:
        raise ValueError(
            f"master_port={master_port.value} (from {master_port.source}) is not a TCP port. Give one from 1 to 65535."
        )
    found: dict[str, Found[Any]] = {
        "nproc": nproc,
        "world_size": world_size,
        "base_rank": base_rank,
        "node_rank": node_rank,
        "master_addr": master_addr,
        "master_port": master_port,
    }
    values = {name: each.value for name, each in found.items()}
    return Topology(**values, sources={name: each.source for name, each in found.items()})


def resolve_nproc(options: Options, environ: Mapping[str, str], count_accelerators: Callable[[], int]) -> Found[int]:
    """Return the number of processes on this node. Accelerators are counted only if no other source gives a number."""
    inputs = _Inputs(options, environ)
    nproc = inputs.flag("nproc") or inputs.variable("LOCAL_WORLD_SIZE")
    if nproc is None and inputs.hints is not None:
        nproc = inputs.hints.nproc()
    if nproc is None:
        count = count_accelerators()
        nproc = Found(count, f"{count} visible accelerators")
    # A node without accelerators trains on its CPU; only an explicit --nproc 0 is an error.
    if nproc.value == 0 and nproc.source != "--nproc":
        nproc = Found(1, f"at least 1; {nproc.source} gives 0")
    if nproc.value < 1:
        raise ValueError(f"nproc={nproc.value} (from {nproc.source}) starts no process. Give --nproc 1 or more.")
    return nproc


class _Inputs:
    """The sources of values. The cluster's variables are read only if options and environment lack a value."""

    def __init__(self, options: Options, environ: Mapping[str, str]) -> None:
        # A rank that launches others starts a new run, to which the variables of its own run do not apply. They do
        # if only the environment was inherited, as by a job that a rank submitted.
        is_nested = is_within(environ.get(LAUNCH_ID, ""))
        cluster = "none" if is_nested and options.cluster == "auto" else options.cluster
        self.options = options
        self.environ = {name: environ[name] for name in environ if not (is_nested and name in _OF_LAUNCHERS)}
        self._infer = lambda: infer(cluster, environ)
        if cluster not in ("auto", "none"):
            _ = self.hints  # raises now if the named cluster's variables are missing

    @cached_property
    def hints(self) -> ClusterHints | None:
        return self._infer()

    def flag(self, name: str) -> Found[int] | None:
        value: int | None = getattr(self.options, name)
        return None if value is None else Found(value, option(name))

    def variable(self, name: str) -> Found[int] | None:
        text = self.environ.get(name, "")
        if not text:
            return None
        try:
            return Found(int(text), name)
        except ValueError:
            raise ValueError(
                f"the environment variable {name}={text!r} is not an integer. Set it to one, unset it, or give the "
                "value as an option."
            ) from None

    def integer(self, name: str) -> Found[int] | None:
        return self.flag(name) or self.variable(name.upper())

    def text(self, name: str) -> Found[str] | None:
        typed: str | None = getattr(self.options, name)
        if typed:
            return Found(typed, option(name))
        text = self.environ.get(name.upper())
        return Found(text, name.upper()) if text else None


def _world_size(inputs: _Inputs, nproc: Found[int]) -> Found[int]:
    environ = inputs.environ
    world_size = inputs.flag("world_size")
    # Equal numbers describe a single node, whose number of processes --nproc may override.
    if world_size is None and environ.get("WORLD_SIZE") != environ.get("LOCAL_WORLD_SIZE"):
        world_size = inputs.variable("WORLD_SIZE")
    if world_size is None and inputs.hints is not None:
        num_nodes = inputs.hints.num_nodes()
        world_size = Found(nproc.value * num_nodes.value, f"nproc * {num_nodes.source}={num_nodes.value}")
    world_size = world_size or Found(nproc.value, "nproc")
    if world_size.value < nproc.value:
        raise ValueError(
            f"world_size={world_size.value} (from {world_size.source}) is less than the nproc={nproc.value} processes "
            f"(from {nproc.source}) of this node alone. Lower --nproc, or raise --world-size."
        )
    return world_size


def _ranks_of_one_node(inputs: _Inputs, nproc: Found[int], world_size: Found[int]) -> tuple[Found[int], Found[int]]:
    base_rank, node_rank = inputs.integer("base_rank"), inputs.integer("node_rank")
    if base_rank is None and node_rank is None and inputs.hints is not None:
        node_rank = inputs.hints.node_rank()
    for name, value in (("base_rank", base_rank), ("node_rank", node_rank)):
        if value is not None and value.value < 0:
            raise ValueError(f"{name}={value.value} (from {value.source}) is below 0. Ranks and nodes count from 0.")
    nodes = f"world_size={world_size.value} (from {world_size.source}) and nproc={nproc.value} (from {nproc.source})"
    if base_rank is None or node_rank is None:
        base_rank, node_rank = _other_rank(base_rank, node_rank, nproc.value, world_size.value, nodes)
    if base_rank.value + nproc.value > world_size.value:
        raise ValueError(
            f"the last rank of this node would be {base_rank.value + nproc.value - 1}, with base_rank="
            f"{base_rank.value} (from {base_rank.source}), but {nodes} end with rank {world_size.value - 1}. Lower "
            "the node's or base rank, or raise --world-size."
        )
    return base_rank, node_rank


def _other_rank(
    base_rank: Found[int] | None, node_rank: Found[int] | None, nproc: int, world_size: int, nodes: str
) -> tuple[Found[int], Found[int]]:
    """Return the lowest rank and the node's rank, of which one follows from the other on nodes that are alike."""
    known = base_rank or node_rank
    if known is None:
        raise ValueError(
            f"{nodes} mean several nodes, but this node's rank is unknown. Give --node-rank or --base-rank."
        )
    wanted, given = ("node_rank", "base_rank") if known is base_rank else ("base_rank", "node_rank")
    if world_size % nproc or (known is base_rank and known.value % nproc):
        raise ValueError(
            f"{wanted} does not follow from {given}={known.value} (from {known.source}): {nodes} do not fit nodes with "
            f"equally many processes. Give {option(wanted)} as well."
        )
    if known is base_rank:
        return known, Found(known.value // nproc, f"{known.source} / nproc")
    return Found(known.value * nproc, f"{known.source} * nproc"), known


def _meeting_point(inputs: _Inputs, world_size: Found[int], nproc: Found[int]) -> tuple[Found[str], Found[int]]:
    """Return address and port of rank 0 for several nodes, which must be the same on all of them."""
    master_addr = inputs.text("master_addr") or (inputs.hints and inputs.hints.master_addr())
    master_port = inputs.integer("master_port") or (inputs.hints and inputs.hints.master_port())
    reason = f"world_size={world_size.value} (from {world_size.source}) is more than nproc={nproc.value}"
    if not master_addr:
        raise ValueError(
            f"master_addr is not known, but {reason}: the nodes must know where rank 0 is. Give --master-addr HOST, "
            "the same on every node."
        )
    if not master_port:
        raise ValueError(
            f"master_port is not known, but {reason}: the nodes must agree on one. Give --master-port, one that is "
            "free on rank 0's host, the same on every node."
        )
    return master_addr, master_port


_HOOK_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook")


def child_environments(topology: Topology, options: Options, environ: Mapping[str, str]) -> dict[int, dict[str, str]]:
    """Return the variables of each local rank that differ from the launcher's own."""
    common = common_environment(topology.nproc, options, environ) | {
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(topology.nproc),
        "NODE_RANK": str(topology.node_rank),
        "MASTER_ADDR": topology.master_addr,
        "MASTER_PORT": str(topology.master_port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),  # the launcher serves the store, so rank 0 does not
    }
    return {
        local_rank: common | {"RANK": str(topology.base_rank + local_rank), "LOCAL_RANK": str(local_rank)}
        for local_rank in range(topology.nproc)
    }


def common_environment(nproc: int, options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are equal on all ranks."""
    # Unbuffered, so that the last output of a killed rank is not lost; a failed NCCL collective ends its rank.
    common = {"PYTHONUNBUFFERED": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    common |= {name: environ[name] for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING",) if environ.get(name)}
    if nproc > 1 and not environ.get("OMP_NUM_THREADS"):
        # By default each rank would use all cores; torchrun's single thread leaves cores idle.
        has_affinity = hasattr(os, "sched_getaffinity")  # less than cpu_count() in containers and jobs with some cores
        num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        common["OMP_NUM_THREADS"] = str(max(1, num_cores // nproc))
        _log.info("OMP_NUM_THREADS=%s: the usable cores divided by the ranks.", common["OMP_NUM_THREADS"])
    if options.elastic_batch is not None:
        common["COMPOSER_ELASTIC_BATCH"] = options.elastic_batch
    if options.no_runs:
        common["COMPOSER_RUNS"] = ""
    elif options.runs is not None or "COMPOSER_RUNS" not in environ:  # set but empty disables it
        common["COMPOSER_RUNS"] = options.runs or RUNS
    return common


def hook_environment(options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a Python rank records its exception, from its first import on."""
    if options.command_mode:
        return {}  # the command may start any number of interpreters
    return {"PYTHONPATH": os.pathsep.join(filter(None, (_HOOK_FOLDER, environ.get("PYTHONPATH"))))}


def child_command(options: Options, environ: Mapping[str, str]) -> list[str]:
    """Return the command of a rank, with `~` and the variables of its environment expanded in the arguments."""
    interpreter = [] if options.command_mode else [options.python]
    module = ["-m"] if options.module_mode else []
    arguments = [_expand(argument, environ) for argument in options.training_script_args]
    return [*interpreter, *module, options.training_script, *arguments]


def _expand(argument: str, environ: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return environ.get(match[1] or match[2], match[0])

    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, os.path.expanduser(argument))


_UNSET = ("", "false")


def named_file(stream: str, options: Options, env: Mapping[str, str], environ: Mapping[str, str]) -> str | None:
    """Return the file that a rank's `'stdout'` or `'stderr'` is appended to; `None` for the console or the logs."""
    if env["LOCAL_RANK"] == "0":
        return None  # on the console
    # On MosaicML's platform, which collects these files.
    folder, prefix = environ.get("MOSAICML_LOG_DIR", ""), environ.get("MOSAICML_GPU_LOG_FILE_PREFIX", "")
    is_hosted = environ.get("MOSAICML_PLATFORM", "").lower() == "true"
    if is_hosted and folder.lower() not in _UNSET and prefix.lower() not in _UNSET:
        return os.path.join(folder, f"{prefix}{env['LOCAL_RANK']}.txt")  # both streams in one file
    name_format: str | None = getattr(options, stream)
    if name_format is None:
        return None
    return name_format.format(**{name: int(env[name.upper()]) for name in PLACEHOLDERS})


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
    """Return the settings of the rendezvous from options, topology and environment."""
    nnodes = options.nnodes  # N or MIN:MAX
    if nnodes is None:
        assert topology is not None
        if topology.world_size % topology.nproc:  # the nodes are not alike
            raise ValueError(
                f"--max-restarts needs the number of nodes, which world_size={topology.world_size} and nproc="
                f"{topology.nproc} do not determine. Give --nnodes and --rdzv-endpoint instead of --world-size."
            )
        nnodes = str(topology.world_size // topology.nproc)
    low, _, high = nnodes.partition(":")
    min_nodes, max_nodes = int(low), int(high or low)
    config = _parse_config(options.rdzv_conf)
    endpoint = options.rdzv_endpoint
    if endpoint is None and topology is not None and topology.has_meeting_point:
        endpoint = f"{topology.master_addr}:{topology.master_port}"
        # Node 0 serves the store, unless --rdzv-conf decides otherwise.
        config = {"is_host": str(topology.node_rank == 0).lower()} | config
    if endpoint is None and max_nodes > 1:
        raise ValueError(
            f"--nnodes={options.nnodes!r} nodes must know where they meet. Give --rdzv-endpoint HOST:PORT, the same on "
            "every node, where HOST is one of them."
        )
    named = next((environ[name] for name in _RUN_NAMES if environ.get(name)), None)
    return Rendezvous(
        nproc=nproc,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        backend=options.rdzv_backend,
        endpoint=endpoint or "localhost:0",
        run_id=options.rdzv_id or named or ("composer" if max_nodes > 1 else uuid.uuid4().hex),
        config=config,
    )


def _parse_config(text: str) -> dict[str, str]:
    config: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ValueError(f"--rdzv-conf={text!r}: {pair!r} is not KEY=VALUE. Separate several with commas.")
        config[key.strip()] = value.strip()
    return config
