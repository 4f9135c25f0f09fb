"""The `composer` command."""

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import entry_points
from typing import Any

from composer_dist.launch.args import Options, parse_options
from composer_dist.launch.console import open_console, release_console, say
from composer_dist.launch.preflight import (
    CannotStartError,
    Rendezvous,
    check_command,
    check_meeting_point,
    check_rendezvous,
    resolve_rendezvous,
)
from composer_dist.launch.topology import (
    Topology,
    child_command,
    child_environments,
    common_environment,
    named_file,
    resolve,
    resolve_nproc,
)
from composer_dist.stale_memory import tidy_shared_memory

__all__ = ["GROUP", "find_command", "explain", "main"]

_USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `composer` command and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    open_console()
    try:
        command = find_command(arguments)
        return _launch(arguments) if command is None else command(arguments[1:])
    except CannotStartError as error:
        say(f"composer: error: {error}", "stderr")
        return _USAGE_ERROR
    except KeyboardInterrupt:  # before any rank was started
        return 130
    finally:
        release_console()


def _launch(arguments: Sequence[str]) -> int:
    """Prepare and run a launch; an error of the preparation is an error of the command line."""
    try:
        start = _prepare(arguments)
    except ValueError as error:  # later ones are not errors of the command line
        raise CannotStartError(str(error)) from error
    return start()  # outside the try: a ValueError of the run is not a usage error


def _prepare(arguments: Sequence[str]) -> Callable[[], int]:
    """Check the command line and return a function that carries it out."""
    options = parse_options(arguments)
    _configure_logging(options)
    nproc = resolve_nproc(options, os.environ, _count_accelerators)
    topology = resolve(options, os.environ, nproc) if options.nnodes is None else None
    rendezvous = resolve_rendezvous(options, nproc.value, topology, os.environ) if options.is_elastic else None
    if options.dry_run:
        plan = explain(options, topology, rendezvous, os.environ)
        return lambda: say(json.dumps(plan, indent=2)) or 0
    check_command(options)
    if rendezvous is not None and (options.rdzv_endpoint or topology is None):
        check_rendezvous(rendezvous)
    elif topology is not None:
        check_meeting_point(topology)
    tidy_shared_memory()  # a dataset fails on names that a killed run left behind
    # Loads torch, which would delay `--help` and errors of the command line.
    from composer_dist.launch.run import run, run_elastic

    if rendezvous is not None:
        return lambda: run_elastic(options, rendezvous)
    assert topology is not None
    return lambda: run(options, topology)


def _configure_logging(options: Options) -> None:
    """Show the launcher's own messages, and torch's only with `--verbose`."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("composer: %(message)s"))
    log = logging.getLogger("composer_dist.launch")
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO if options.verbose else logging.WARNING)
    log.propagate = False  # a root handler would print each line twice
    logging.getLogger("composer_dist.stale_memory").addHandler(handler)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.INFO if options.verbose else logging.CRITICAL)


def _count_accelerators() -> int:
    import torch  # slow, so only if the number of processes is not given

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


GROUP = "composer.commands"


def find_command(arguments: Sequence[str]) -> Callable[[Sequence[str]], int] | None:
    """Return the command that a command line begins with, or `None` if it names a script.

    A distribution adds a command by an entry point of the group `composer.commands`: a function from the arguments
    after the name to the exit status. A file of the same name takes precedence, since scripts need no extension.
    """
    name = arguments[0] if arguments else ""
    if not name.isidentifier() or os.path.exists(name):  # options and paths are not commands
        return None
    for found in entry_points(group=GROUP, name=name):
        return found.load()
    return None


def explain(
    options: Options, topology: Topology | None, rendezvous: Rendezvous | None, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the ranks of this node, with commands and environments, as JSON values.

    With a rendezvous, the result has only what is known before it: on a single node all but the store's address.
    """
    plan: dict[str, Any] = {"engine": "fixed"}
    if rendezvous is not None:
        plan = {"engine": "elastic", "rendezvous": asdict(rendezvous), "max_restarts": options.max_restarts}
        if topology is None or topology.is_multi_node:  # ranks depend on the order in which the nodes arrive
            common = common_environment(rendezvous.nproc, options, environ)
            return plan | {"env": common, "argv": child_command(options, environ)}
    assert topology is not None
    envs = child_environments(topology, options, environ)
    sources = _sources(options, topology, environ)
    if rendezvous is not None:
        for env in envs.values():
            env |= {
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
                "TORCHELASTIC_RUN_ID": rendezvous.run_id,
            }
            del env["MASTER_ADDR"], env["MASTER_PORT"]
        later = dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), "torch, when the rendezvous is complete")
    else:
        later = {}
    return plan | {
        "topology": {
            name: {"value": getattr(topology, name), "source": source} for name, source in topology.sources.items()
        },
        "env_sources": {name: sources.get(name, "the launcher") for name in next(iter(envs.values()))} | later,
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


def _sources(options: Options, topology: Topology, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the sources of a rank's variables other than the launcher itself."""
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
    return of_topology | others | own


def _destination(stream: str, options: Options, env: Mapping[str, str], environ: Mapping[str, str]) -> str:
    if env["LOCAL_RANK"] == "0" or options.tee:
        return "console"
    return named_file(stream, options, env, environ) or "shown if the rank fails"
