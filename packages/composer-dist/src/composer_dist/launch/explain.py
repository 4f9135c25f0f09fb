"""What a launch would do, as JSON: which ranks, with which variables and commands, and what said so."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

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
    return json.dumps({"engine": "fixed"} | _plan(options, topology, envs, environ), indent=2)


def explain_elastic(
    options: Options, rendezvous: Rendezvous, topology: Topology | None, environ: Mapping[str, str]
) -> str:
    """Return what is known before the nodes have met, which on a single node is all but the address of their store.

    Args:
        options: What was typed.
        rendezvous: Where they would meet.
        topology: This node's place, if the number of nodes does not change.
        environ: The launcher's environment.
    """
    plan = {"engine": "elastic", "rendezvous": asdict(rendezvous), "max_restarts": options.max_restarts}
    if topology is None or topology.is_multi_node:  # who comes first gets the first ranks
        return json.dumps(
            plan
            | {
                "env": common_environment(rendezvous.nproc, options, environ),
                "argv": child_command(options, environ),
            },
            indent=2,
        )
    added = {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        "TORCHELASTIC_RUN_ID": rendezvous.run_id,
    }
    envs = {lr: env | added for lr, env in child_environments(topology, options, environ).items()}
    for env in envs.values():
        del env["MASTER_ADDR"], env["MASTER_PORT"]
    later = dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), "torch, when the rendezvous is complete")
    ranks = _plan(options, topology, envs, environ)
    return json.dumps(plan | ranks | {"env_sources": ranks["env_sources"] | later}, indent=2)


def _plan(
    options: Options, topology: Topology, envs: Mapping[int, Mapping[str, str]], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return where this node is, and what its ranks are started with."""
    return {
        "topology": {
            name: {"value": getattr(topology, name), "source": source} for name, source in topology.sources.items()
        },
        "env_sources": _sources(options, topology, environ, next(iter(envs.values()))),
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


def _sources(
    options: Options, topology: Topology, environ: Mapping[str, str], env: Mapping[str, str]
) -> dict[str, str]:
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
        "COMPOSER_RUNS": "--no_runs" if options.no_runs else "--runs" if options.runs else "the default of --runs",
        "TORCHELASTIC_MAX_RESTARTS": "--max_restarts",
    }
    own = {name: name for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING",) if environ.get(name)}
    known = of_topology | others | own
    return {name: known.get(name, "the launcher") for name in env}


def _destination(stream: str, options: Options, env: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Return where a stream goes beside the folder of the logs."""
    if env["LOCAL_RANK"] == "0" or options.tee:
        return "console"
    return named_file(stream, options, env, environ) or "shown if the rank fails"
