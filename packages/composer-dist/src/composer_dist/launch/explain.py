"""What a launch would do, as JSON: which ranks, with which variables and commands, and what said so."""

import json
from collections.abc import Mapping
from dataclasses import asdict

from composer_dist.launch.args import Options
from composer_dist.launch.children import child_command, child_environments, common_environment
from composer_dist.launch.destinations import named_file
from composer_dist.launch.rendezvous import Rendezvous
from composer_dist.launch.topology import Topology

__all__ = ["explain", "explain_elastic"]


def explain(options: Options, topology: Topology, environ: Mapping[str, str]) -> str:
    """Return what would be started on this node.

    Args:
        options: What was typed.
        topology: This node's place.
        environ: The launcher's environment.
    """
    envs = child_environments(topology, options, environ)
    sources = topology.sources
    plan = {
        "engine": "fixed",
        "topology": {name: {"value": getattr(topology, name), "source": source} for name, source in sources.items()},
        "env_sources": _sources(topology, environ, next(iter(envs.values()))),
        "ranks": [
            {
                "rank": int(env["RANK"]),
                "local_rank": local_rank,
                "argv": child_command(options, {**environ, **env}),
                "env": env,
                "stdout": _destination("stdout", options, env, environ),
                "stderr": _destination("stderr", options, env, environ),
            }
            for local_rank, env in envs.items()
        ],
    }
    return json.dumps(plan, indent=2)


def explain_elastic(options: Options, rendezvous: Rendezvous, environ: Mapping[str, str]) -> str:
    """Return what is known before the nodes have met.

    Args:
        options: What was typed.
        rendezvous: Where they would meet.
        environ: The launcher's environment.
    """
    plan = {
        "engine": "elastic",
        "rendezvous": asdict(rendezvous),
        "max_restarts": options.max_restarts,
        "env": common_environment(rendezvous.nproc, options, environ),
        "argv": child_command(options, environ),
    }
    return json.dumps(plan, indent=2)


def _sources(topology: Topology, environ: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Return where each variable of a rank comes from."""
    of_topology = {
        "RANK": f"base_rank + LOCAL_RANK; base_rank from {topology.sources['base_rank']}",
        "LOCAL_RANK": "the number of the process on this node",
        "LOCAL_WORLD_SIZE": topology.sources["nproc"],
        **{name.upper(): topology.sources[name] for name in ("world_size", "node_rank", "master_addr", "master_port")},
    }
    others = {
        "OMP_NUM_THREADS": "usable processor cores / nproc",
        "COMPOSER_ELASTIC_BATCH": "--elastic_batch",
    }
    own = {name: name for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING",) if environ.get(name)}
    known = of_topology | others | own
    return {name: known.get(name, "the launcher") for name in env}


def _destination(stream: str, options: Options, env: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Return where a stream goes beside the folder of the logs."""
    if env["LOCAL_RANK"] == "0" or options.tee:
        return "console"
    return named_file(stream, options, env, environ) or "shown if the rank fails"
