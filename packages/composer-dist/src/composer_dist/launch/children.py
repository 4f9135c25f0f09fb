"""What each rank is started with: its environment and its command."""

import logging
import os
import re
from collections.abc import Mapping

from composer_dist.launch.args import RUNS, Options
from composer_dist.launch.topology import Topology

__all__ = ["child_command", "child_environments", "common_environment", "hook_environment"]

_HOOK_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook")
_log = logging.getLogger("composer_dist.launch")


def child_environments(topology: Topology, options: Options, environ: Mapping[str, str]) -> dict[int, dict[str, str]]:
    """Return, for each local rank, the variables that differ from the launcher's own."""
    common = common_environment(topology.nproc, options, environ) | {
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(topology.nproc),
        "NODE_RANK": str(topology.node_rank),
        "MASTER_ADDR": topology.master_addr,
        "MASTER_PORT": str(topology.master_port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),  # the launcher of rank 0 listens there, and rank 0 need not
    }
    return {
        local_rank: common | {"RANK": str(topology.base_rank + local_rank), "LOCAL_RANK": str(local_rank)}
        for local_rank in range(topology.nproc)
    }


def common_environment(nproc: int, options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that all ranks get alike, however their numbers are found."""
    common = {"PYTHONUNBUFFERED": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    common |= {name: environ[name] for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING",) if environ.get(name)}
    if nproc > 1 and not environ.get("OMP_NUM_THREADS"):
        # Each rank would take all cores, and torchrun's choice of one thread leaves cores idle.
        common["OMP_NUM_THREADS"] = str(max(1, _num_usable_cores() // nproc))
        _log.info("OMP_NUM_THREADS=%s: the usable cores divided by the ranks.", common["OMP_NUM_THREADS"])
    if options.elastic_batch is not None:
        common["COMPOSER_ELASTIC_BATCH"] = options.elastic_batch
    if options.no_runs:
        common["COMPOSER_RUNS"] = ""
    elif options.runs is not None or "COMPOSER_RUNS" not in environ:  # set and empty says that none is wanted
        common["COMPOSER_RUNS"] = options.runs or RUNS
    return common


def hook_environment(options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which a Python rank records what it raises, from its first import on.

    Args:
        options: What was typed.
        environ: The rank's environment without them.
    """
    if options.command_mode:
        return {}  # who knows how many interpreters it starts
    return {"PYTHONPATH": os.pathsep.join(filter(None, (_HOOK_FOLDER, environ.get("PYTHONPATH"))))}


def child_command(options: Options, environ: Mapping[str, str]) -> list[str]:
    """Return the command of a rank, with `~` and variables expanded in the script's arguments.

    Args:
        options: What was typed.
        environ: The rank's whole environment. Variables that it does not have stay as they are written.
    """
    interpreter = [] if options.command_mode else [options.python]
    module = ["-m"] if options.module_mode else []
    arguments = [_expand(argument, environ) for argument in options.training_script_args]
    return [*interpreter, *module, options.training_script, *arguments]


def _num_usable_cores() -> int:
    """Return how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _expand(argument: str, environ: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return environ.get(match[1] or match[2], match[0])

    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, os.path.expanduser(argument))
