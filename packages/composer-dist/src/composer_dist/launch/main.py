"""The `composer` command, and the checks before any process starts."""

import errno
import json
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from composer_dist.launch.args import GROUP, CannotStartError, Options, parse_options
from composer_dist.launch.report import open_console, release_console, say
from composer_dist.launch.topology import (
    FREE_PORT,
    Rendezvous,
    Topology,
    child_command,
    child_environments,
    common_environment,
    named_file,
    resolve,
    resolve_nproc,
    resolve_rendezvous,
)
from composer_dist.stale_memory import tidy_shared_memory

__all__ = ["GROUP", "find_command", "explain", "main"]

_log = logging.getLogger("composer_dist.launch")
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
    try:
        start = _prepare(arguments)
    except ValueError as error:  # later ones are not errors of the command line
        raise CannotStartError(str(error)) from error
    return start()  # outside the try: a ValueError of the run is not a usage error


def _prepare(arguments: Sequence[str]) -> Callable[[], int]:
    """Check the command line and return a function that carries it out."""
    options = parse_options(arguments)
    find_interpreter(options)
    _configure_logging(options)
    nproc = resolve_nproc(options, os.environ, _count_accelerators)
    topology = resolve(options, os.environ, nproc) if options.nnodes is None else None
    rendezvous = resolve_rendezvous(options, nproc.value, topology, os.environ) if options.is_elastic else None
    if options.dry_run:
        plan = explain(options, topology, rendezvous, os.environ)
        return lambda: say(json.dumps(plan, indent=2)) or 0
    check_command(options)
    if rendezvous is not None and (options.rdzv_endpoint or topology is None):
        # With other backends and stores, the endpoint need not be a host.
        if rendezvous.backend in ("c10d", "static") and rendezvous.config.get("store_type") != "file":
            endpoint = rendezvous.endpoint
            host = endpoint.rpartition(":")[0] if ":" in endpoint else endpoint
            if host := host.strip("[]"):  # of an IPv6 address
                timeout_s = _RESOLVE_TIMEOUT_S * (rendezvous.max_nodes > 1)
                _wait_for_address(f"--rdzv-endpoint={endpoint!r}", host, timeout_s)
    elif topology is not None:
        check_meeting_point(topology)
    tidy_shared_memory()  # a dataset fails on names that a killed run left behind
    # Loads torch, which would delay `--help` and errors of the command line.
    from composer_dist.launch.run import run, run_elastic

    if rendezvous is not None:
        return lambda: run_elastic(options, rendezvous)
    assert topology is not None
    return lambda: run(options, topology)


def find_interpreter(options: Options) -> None:
    """Run a script by the module that a distribution has for files with its ending, such as recipes in YAML.

    The module is an entry point of the group `composer.scripts`, whose name is the ending without its dot, or that of
    a command which ranks can run, such as `doctor`.
    """
    script = options.training_script
    ending, is_file = os.path.splitext(script)[1].removeprefix("."), _is_script(script)
    if ending == "py" or options.module_mode or options.command_mode or bool(ending) != is_file:
        return
    for found in entry_points(group="composer.scripts", name=ending or script):
        if is_file:
            options.training_script_args = [script, *options.training_script_args]
        options.training_script, options.module_mode = found.value, True


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


_RESOLVE_TIMEOUT_S = 10.0  # a cluster may register rank 0's host a little after its nodes start
_POD_TIMEOUT_S = 600.0  # a pod has an address only when a machine for it was found


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
    is_pod = source in ("COMPOSER_MASTER_ADDR", "PET_MASTER_ADDR")
    timeout_s = 0 if not topology.is_multi_node else _POD_TIMEOUT_S if is_pod else _RESOLVE_TIMEOUT_S
    _wait_for_address(f"master_addr={addr!r} (from {source})", addr, timeout_s)
    if topology.base_rank != 0:
        return
    found = socket.getaddrinfo(addr, topology.master_port, type=socket.SOCK_STREAM)
    # Only an address of this machine can be bound.
    if all(_bind_error(family, str(address[0]), 0) == errno.EADDRNOTAVAIL for family, *_, address in found):
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
                f"--master-port, {'the same on every node' if topology.is_multi_node else 'or none for a free one'}."
            )


def _wait_for_address(what: str, host: str, timeout_s: float) -> None:
    """Raise if a host has no address after some time."""
    deadline = time.monotonic() + timeout_s
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


def _bind_error(family: int, addr: str, port: int) -> int | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
            listener.bind((addr, port))
            listener.listen(1)
    except OSError as error:
        return error.errno
    return None


def _is_script(path: str) -> bool:
    """Return whether Python can run a path: a file, or a folder with `__main__.py`."""
    return os.path.isfile(path) or os.path.isfile(os.path.join(path, "__main__.py"))


def find_command(arguments: Sequence[str]) -> Callable[[Sequence[str]], int] | None:
    """Return the command that a command line begins with, or `None` if it names a script.

    A distribution adds a command by an entry point of the group `composer.commands`: a function from the arguments
    after the name to the exit status. A script of the same name takes precedence, since scripts need no extension.
    """
    name = arguments[0] if arguments else ""
    if not name.isidentifier() or _is_script(name):  # options and paths are not commands
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
    if rendezvous is not None:
        for env in envs.values():
            env |= {
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
                "TORCHELASTIC_RUN_ID": rendezvous.run_id,
            }
            del env["MASTER_ADDR"], env["MASTER_PORT"]  # known when the rendezvous is complete
    return plan | {
        "topology": {
            name: {"value": getattr(topology, name), "source": source} for name, source in topology.sources.items()
        },
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


def _destination(stream: str, options: Options, env: Mapping[str, str], environ: Mapping[str, str]) -> str:
    if env["LOCAL_RANK"] == "0" or options.tee:
        return "console"
    return named_file(stream, options, env, environ) or "shown if the rank fails"
