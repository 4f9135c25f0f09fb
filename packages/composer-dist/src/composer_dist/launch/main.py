"""The `composer` command."""

import logging
import os
import sys
from collections.abc import Callable, Sequence

from composer_dist.launch.args import Options, parse_options
from composer_dist.launch.commands import find_command
from composer_dist.launch.console import open_console, release_console, say
from composer_dist.launch.explain import explain, explain_elastic
from composer_dist.launch.preflight import CannotStartError, check_command, check_meeting_point, check_rendezvous
from composer_dist.launch.rendezvous import Rendezvous, resolve_rendezvous
from composer_dist.launch.topology import Topology, resolve, resolve_nproc
from composer_dist.stale_memory import tidy_shared_memory

__all__ = ["main"]

_USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `composer` command and return its exit status.

    Args:
        arguments: The command line after the command's name. That of this process when `None`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    open_console()
    try:
        command = find_command(arguments)
        return _launch(arguments) if command is None else command(arguments[1:])
    except CannotStartError as error:
        say(f"composer: error: {error}", "stderr")
        return _USAGE_ERROR
    except KeyboardInterrupt:  # before there was anything to end
        return 130
    finally:
        release_console()


def _launch(arguments: Sequence[str]) -> int:
    """Find out what to start, and start it or say what it is."""
    try:
        start = _prepare(arguments)
    except ValueError as error:  # whereas one that comes later is no fault of the command line
        raise CannotStartError(str(error)) from error
    return start()


def _prepare(arguments: Sequence[str]) -> Callable[[], int]:
    """Return what the command line asks for, ready to be done."""
    options = parse_options(arguments)
    _configure_logging(options)
    nproc = resolve_nproc(options, os.environ, _count_accelerators)
    topology = resolve(options, os.environ, nproc) if options.nnodes is None else None
    rendezvous = resolve_rendezvous(options, nproc.value, topology, os.environ) if options.is_elastic else None
    if options.dry_run:
        return lambda: _show(options, topology, rendezvous)
    check_command(options)
    if rendezvous is not None and (options.rdzv_endpoint or topology is None):
        check_rendezvous(rendezvous)
    elif topology is not None:
        check_meeting_point(topology)
    tidy_shared_memory()  # a dataset may need the names that a killed run has left
    # What follows loads torch, which neither `--help` nor a wrong command line should wait for.
    if rendezvous is not None:
        from composer_dist.launch.elastic import run_elastic

        return lambda: run_elastic(options, rendezvous)
    from composer_dist.launch.run import run

    assert topology is not None
    return lambda: run(options, topology)


def _show(options: Options, topology: Topology | None, rendezvous: Rendezvous | None) -> int:
    """Print what would be started."""
    if rendezvous is not None:
        say(explain_elastic(options, rendezvous, topology, os.environ))
    else:
        assert topology is not None
        say(explain(options, topology, os.environ))
    return 0


def _configure_logging(options: Options) -> None:
    """Have the launcher's own messages shown, and torch's only if they were asked for."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("composer: %(message)s"))
    log = logging.getLogger("composer_dist.launch")
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO if options.verbose else logging.WARNING)
    log.propagate = False
    logging.getLogger("composer_dist.stale_memory").addHandler(handler)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.INFO if options.verbose else logging.CRITICAL)


def _count_accelerators() -> int:
    import torch  # only if nobody said how many processes to start

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0
