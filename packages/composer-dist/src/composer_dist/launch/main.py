"""The `composer` command."""

import logging
import os
import sys
from collections.abc import Sequence

from composer_dist.launch.args import Options, parse_options
from composer_dist.launch.explain import explain, explain_elastic
from composer_dist.launch.preflight import check_command, check_meeting_point
from composer_dist.launch.rendezvous import Rendezvous, resolve_rendezvous
from composer_dist.launch.topology import Topology, resolve, resolve_nproc

__all__ = ["main"]

_USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `composer` command and return its exit status.

    Args:
        arguments: The command line after the command's name. That of this process when `None`.
    """
    try:
        options = parse_options(sys.argv[1:] if arguments is None else arguments)
        _configure_logging(options)
        return _launch(options)
    except ValueError as error:
        sys.stderr.write(f"composer: error: {error}\n")
        return _USAGE_ERROR
    except KeyboardInterrupt:  # before there was anything to end
        return 130


def _launch(options: Options) -> int:
    """Find out what to start, and start it or say what it is."""
    nproc = resolve_nproc(options, os.environ, _count_accelerators)
    topology = resolve(options, os.environ, nproc) if options.nnodes is None else None
    rendezvous = resolve_rendezvous(options, nproc.value, topology, os.environ) if options.is_elastic else None
    if options.dry_run:
        sys.stdout.write(f"{_explain(options, topology, rendezvous)}\n")
        return 0
    check_command(options)
    if topology is not None and (rendezvous is None or topology.is_multi_node):
        check_meeting_point(topology)
    # What follows loads torch, which neither `--help` nor a wrong command line should wait for.
    if rendezvous is not None:
        from composer_dist.launch.elastic import run_elastic

        return run_elastic(options, rendezvous)
    from composer_dist.launch.run import run

    assert topology is not None
    return run(options, topology)


def _explain(options: Options, topology: Topology | None, rendezvous: Rendezvous | None) -> str:
    if rendezvous is not None:
        return explain_elastic(options, rendezvous, os.environ)
    assert topology is not None
    return explain(options, topology, os.environ)


def _configure_logging(options: Options) -> None:
    """Have the launcher's own messages shown, and torch's only if they were asked for."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("composer: %(message)s"))
    log = logging.getLogger("composer_dist.launch")
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO if options.verbose else logging.WARNING)
    log.propagate = False
    logging.getLogger("torch.distributed.elastic").setLevel(logging.INFO if options.verbose else logging.CRITICAL)


def _count_accelerators() -> int:
    import torch  # only if nobody said how many processes to start

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0
