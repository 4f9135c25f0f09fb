"""The launcher's command line."""

import argparse
import ast
import math
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FAILURE_TIMEOUT_S = 8.0
"""Seconds for ranks to end after one has failed; with the other steps, the launcher ends within 10 s."""
SIGNAL_TIMEOUT_S = 30.0
"""Seconds for ranks to end after a signal, long enough for a last checkpoint."""
HANG_STATUS = 124
"""Exit status of a rank without progress, as of the command `timeout`."""
RUNS = "runs"
"""The default folder for the run folders."""
CLUSTERS = ("skypilot", "training-operator", "kubernetes", "slurm", "openmpi", "pmi")
"""The supported systems. Slurm comes before MPI, whose processes it may start."""
GROUP = "composer.commands"
"""The group of entry points by which other distributions add commands."""
PLACEHOLDERS = ("rank", "local_rank", "world_size", "local_world_size", "node_rank")
"""Placeholders in the names of output files."""
HANG_PHASES = ("start", "data", "train", "optimizer", "callbacks", "evaluation", "checkpoint", "compile")
"""The phases of a rank that may have their own limit."""

_EPILOG = """\
Everything after the script is passed on to it, options too. '~' and '$VAR' in its arguments are expanded with the
variables of each rank, so that '--log run-$RANK.txt' names one file per rank if your shell leaves it alone.

Exit status: 0 if every rank ended with 0; otherwise that of the rank that failed first, 128 + s if it was killed by
signal s; 128 + s also if the launcher itself received signal s; 124 if the ranks made no progress; 2 for an invalid
command line.
"""


class CannotStartError(ValueError):
    """The ranks cannot be started as requested."""


@dataclass(frozen=True, slots=True)
class HangTimeouts:
    """Limits of the time that a rank may be without progress.

    Attributes:
        default_s: For phases without their own, in seconds; `None` adapts to the run.
        by_phase: Seconds for single phases, such as `'checkpoint'`.
        is_off: Whether ranks are not watched.
    """

    default_s: float | None = None
    by_phase: Mapping[str, float] = field(default_factory=dict[str, float])
    is_off: bool = False

    def of(self, phase: str) -> float | None:
        """Return the limit that the user has set for a phase, or `None`."""
        if phase in ("start", "compile"):  # of unknown length, so that the general limit is not meant for them
            return self.by_phase.get(phase)
        return self.by_phase.get(phase, self.default_s)

    @classmethod
    def parse(cls, text: str) -> "HangTimeouts":
        """Return the value of `--hang-timeout`.

        Raises:
            ValueError: If the text has another form.
        """
        if text == "off":
            return cls(is_off=True)
        default_s, by_phase = None, {}
        for part in text.split(","):
            name, sign, value = part.rpartition("=")
            if value == "auto" and not sign:
                continue
            try:
                seconds = float(value)
            except ValueError:
                seconds = 0.0
            if not 0 < seconds < math.inf or (sign and name not in HANG_PHASES):
                raise ValueError(
                    f"--hang-timeout={text!r} must be 'auto', 'off', or seconds, such as 120; for single phases also "
                    f"120,checkpoint=900. Phases: {', '.join(HANG_PHASES)}."
                )
            if sign:
                by_phase[name] = seconds
            else:
                default_s = seconds
        return cls(default_s, by_phase)


class Options(argparse.Namespace):
    """The parsed command line; `None` for an option that was not given."""

    @property
    def is_elastic(self) -> bool:
        """Return whether a rendezvous assigns the ranks, possibly several times."""
        return self.max_restarts > 0 or self.nnodes is not None


def parse_options(arguments: Sequence[str]) -> Options:
    """Return the options of a command line, given the arguments after the command's name."""
    options = _make_parser().parse_args(arguments, Options())
    rest = options.training_script_args
    # argparse consumes a `--` that directly follows the script.
    if [options.training_script, "--", *rest] == list(arguments[len(arguments) - len(rest) - 2 :]):
        options.training_script_args = ["--", *rest]
    _check_values(options)
    _check_file_names(options)
    _check_rendezvous(options)
    return options


def option(name: str) -> str:
    """Return the spelling on the command line of an attribute of `Options`."""
    return f"--{name.replace('_', '-')}"


def version() -> str:
    """Return what `--version` prints."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed  # reading the metadata takes longer than parsing

    try:
        number = installed("composer-suite")  # the version that users know
    except PackageNotFoundError:  # this package is also used without the Trainer
        number = installed("composer-dist")
    return f"MosaicML Composer {number}"


def _check_values(options: Options) -> None:
    if options.module_mode and options.command_mode:
        raise ValueError(
            "--module-mode and --command-mode exclude each other: the first runs `python -m SCRIPT`, the second runs "
            "SCRIPT without Python. Give one of them, or none for `python SCRIPT`."
        )
    for name in ("max_restarts", "shutdown_timeout", "stopped_timeout"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < math.inf:  # false for "nan" as well
            raise ValueError(f"{option(name)}={value!r} is not a number of 0 or more. Give one.")
    if not 0 < options.monitor_interval < math.inf:
        raise ValueError(
            f"--monitor-interval={options.monitor_interval!r} is not a number above 0. Give seconds, such as 0.1."
        )
    if options.runs == "":
        raise ValueError("--runs='' names no folder. Give a name such as runs, or --no-runs for none.")
    if options.runs is not None and options.no_runs:
        raise ValueError(f"--runs={options.runs!r} and --no-runs exclude each other. Leave one of them out.")
    HangTimeouts.parse(options.hang_timeout)  # for its error
    known = {signum.name for signum in signal.Signals} - {"SIGKILL", "SIGSTOP"}  # no process can handle these
    for name in options.signals_to_handle.split(","):
        if name.strip() not in known:
            raise ValueError(
                f"--signals-to-handle={options.signals_to_handle!r}: {name!r} is not a signal that a process can "
                "handle. Give names such as SIGTERM, separated by commas."
            )
    try:
        re.compile(options.log_filter or "")  # an error now, not in the threads that copy lines
    except re.error as error:
        raise ValueError(f"--log-filter={options.log_filter!r} is not a regular expression: {error}.") from None


def _check_file_names(options: Options) -> None:
    for stream in ("stdout", "stderr"):
        given: str | None = getattr(options, stream)
        if given == "":
            raise ValueError(f"--{stream}='' names no file. Give a name such as {stream}_{{rank}}.log, or none.")
        try:
            (given or "").format(**dict.fromkeys(PLACEHOLDERS, 0))  # as ranks are numbers
        except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
            known = " ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise ValueError(
                f"--{stream}={given!r} is not a file name with placeholders ({type(error).__name__}: {error}). There "
                f"are {known}; write a literal brace twice."
            ) from None


def _check_rendezvous(options: Options) -> None:
    def first_given(*names: str) -> str | None:
        return next((name for name in names if getattr(options, name) not in (None, "")), None)

    if options.nnodes is not None:
        low, _, high = options.nnodes.partition(":")
        # 0 stands for anything but a number, and is rejected below.
        numbers = [int(part) if part.isdecimal() else 0 for part in (low, high or low)]
        if not 0 < numbers[0] <= numbers[1]:
            raise ValueError(
                f"--nnodes={options.nnodes!r} is not a number of nodes. Give N, or MIN:MAX with MIN <= MAX."
            )
        if fixed := first_given("world_size", "base_rank", "node_rank"):
            raise ValueError(
                f"--nnodes and {option(fixed)} exclude each other: with --nnodes the nodes agree on their ranks when "
                "they meet. Leave one of them out."
            )
    name = first_given("rdzv_endpoint", "rdzv_id", "rdzv_conf")
    if name and not options.is_elastic:
        raise ValueError(
            f"{option(name)}={getattr(options, name)!r} is for runs with a rendezvous, and this one has none. Give "
            "--nnodes or --max-restarts as well, or leave it out."
        )
    address = first_given("master_addr", "master_port")
    if address and (options.nnodes is not None or options.rdzv_endpoint is not None):
        other = "nnodes" if options.rdzv_endpoint is None else "rdzv_endpoint"
        raise ValueError(
            f"{option(address)}={getattr(options, address)!r} and {option(other)} exclude each other: ranks meet where "
            "the rendezvous is. Give --rdzv-endpoint HOST:PORT only."
        )


class _Version(argparse.Action):
    """An option that prints the version, without looking it up for other options."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        sys.stdout.write(f"{version()}\n")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """A parser whose help lists the other commands, which are looked up for the help only."""

    def format_help(self) -> str:
        commands = _describe_commands()
        self.epilog = f"other commands, each with --help:\n{commands}\n{_EPILOG}" if commands else _EPILOG
        return super().format_help()


def _describe_commands() -> str:
    found = dict(_commands())
    width = max(map(len, found), default=0)
    return "".join(f"  {name:{width}}  {_description(entry)}".rstrip() + "\n" for name, entry in found.items())


def _commands() -> Iterator[tuple[str, EntryPoint]]:
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        yield f"composer {entry.name}", entry
    for entry in sorted(entry_points(group="console_scripts"), key=lambda entry: entry.name):
        if entry.name.startswith(("composer-", "composer_")):
            yield entry.name, entry


def _description(entry: EntryPoint) -> str:
    """Return the text after the colon in the first line of a module's docstring, without importing the module."""
    with suppress(Exception):  # the list is complete without it
        spec = find_spec(entry.module)
        docstring = ast.get_docstring(ast.parse(Path(str(spec and spec.origin)).read_text(encoding="utf-8")))
        return (docstring or "").partition("\n")[0].partition(": ")[2].removesuffix(".")
    return ""


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="composer",
        usage="composer [-n NPROC] [options] training_script ...",
        description="Run a training script in several processes on this node, as ranks of one run.",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # keeps the line breaks of the epilog
        allow_abbrev=False,  # an abbreviation may become ambiguous with a new option
    )
    parser.add_argument(
        "--version", nargs=0, action=_Version, dest=argparse.SUPPRESS, help="print the version and exit"
    )
    required = parser.add_argument_group("required arguments")
    required.add_argument("training_script", help="file to run in each process; a module with -m, a command with -c")
    required.add_argument(
        "training_script_args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"
    )
    _add_run(_adder(parser))
    _add_nodes(_adder(parser.add_argument_group("several nodes", "Needed if the world size is above NPROC.")))
    _add_output(_adder(parser.add_argument_group("output")))
    _add_end(_adder(parser.add_argument_group("failures, signals and restarts")))
    return parser


_Add = Callable[..., None]


def _adder(group: Any) -> _Add:
    """Return a function that adds an option, also in the older spelling with underscores, which the help leaves out."""

    def add(*names: str, **settings: Any) -> None:
        destination = group.add_argument(*names, **settings).dest
        if older := [f"--{name[2:].replace('-', '_')}" for name in names if "-" in name[2:]]:
            settings.pop("metavar", None)
            # The default must be suppressed, or the alias would overwrite the value of the first spelling.
            hidden = {"dest": destination, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            group.add_argument(*older, **settings | hidden)

    return add


def _add_run(add: _Add) -> None:
    add(
        "-n",
        "--nproc",
        type=int,
        help="processes on this node (default: $LOCAL_WORLD_SIZE, then the cluster's number, then one for each "
        "visible accelerator, at least 1)",
    )
    add("-v", "--verbose", action="store_true", help="log the launcher's actions")
    add("-m", "--module-mode", action="store_true", help="run `python -m training_script`")
    add("-c", "--command-mode", action="store_true", help="run training_script itself, without Python")
    add("--python", default=sys.executable, metavar="PATH", help="interpreter of the ranks (default: the launcher's)")
    add(
        "--numa-binding",
        choices=["node", "socket", "exclusive", "core-complex"],
        help="bind each rank to the processor cores near its accelerator",
    )
    add("--dry-run", action="store_true", help="print the ranks, their environment and commands as JSON; start none")
    # An alias.
    add("--explain", dest="dry_run", action="store_true", default=argparse.SUPPRESS, help="the same as --dry-run")


def _add_nodes(add: _Add) -> None:
    add("--world-size", type=int, help="processes on all nodes (default: $WORLD_SIZE, then NPROC)")
    add(
        "--base-rank",
        type=int,
        help="lowest rank of this node (default: $BASE_RANK, then NODE_RANK * NPROC). Give it together with "
        "--node-rank where the nodes run different numbers of processes.",
    )
    add("--node-rank", type=int, help="number of this node (default: $NODE_RANK, then BASE_RANK / NPROC)")
    add("--master-addr", help="host of rank 0 (default: $MASTER_ADDR; 127.0.0.1 on a single node)")
    add("--master-port", type=int, help="port on that host (default: $MASTER_PORT; a free one on a single node)")
    add(
        "--cluster",
        choices=["auto", "none", *CLUSTERS],
        default="auto",
        help="the cluster manager whose variables give values not set by an option or a variable above (default: "
        "%(default)s)",
    )
    add("-N", "--nnodes", metavar="N|MIN:MAX", help="nodes that meet at a rendezvous and agree on their ranks there")
    add("--rdzv-backend", default="c10d", metavar="NAME", help="kind of rendezvous (default: %(default)s)")
    add("--rdzv-endpoint", metavar="HOST:PORT", help="its address (default: localhost:0, this node alone)")
    add("--rdzv-id", metavar="ID", help="name of the run, the same on every node (default: a random one)")
    add("--rdzv-conf", default="", metavar="K=V,...", help="settings of the rendezvous, such as join_timeout=600")
    add(
        "--elastic-batch",
        choices=["keep-global", "keep-per-device"],
        help="which batch size stays when a run resumes on another number of ranks (default: that per device); "
        "composer's Trainer reads it as $COMPOSER_ELASTIC_BATCH",
    )


def _add_output(add: _Add) -> None:
    placeholders = " ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    add(
        "--stdout",
        metavar="FORMAT",
        help="file to which a rank's stdout is appended, except that of local rank 0, which goes to the console. "
        f"Placeholders: {placeholders}",
    )
    add("--stderr", metavar="FORMAT", help="the same for stderr")
    add("--tee", action="store_true", help="show every rank's output on the console, each line after '[rank N]:'")
    add("--log-filter", metavar="REGEX", help="show those lines of the other ranks on the console that match")
    add(
        "--log-dir",
        metavar="DIR",
        help="where each rank's stdout.log, stderr.log and error.json are kept (default: a temporary folder, which "
        "stays if the run fails). Local rank 0, which has the console, has the logs only with --tee.",
    )
    add(
        "--runs",
        metavar="DIR",
        help="where composer's Trainer leaves a folder for each run: settings, metrics, times (default: "
        f"$COMPOSER_RUNS, then {RUNS})",
    )
    add("--no-runs", action="store_true", help="write no run folder, as with COMPOSER_RUNS= (set, and empty)")


def _add_end(add: _Add) -> None:
    add("--max-restarts", type=int, default=0, metavar="N", help="start all ranks again when one fails, up to N times")
    add(
        "--shutdown-timeout",
        type=float,
        metavar="SECONDS",
        help=f"until ranks that do not end are killed (default: {FAILURE_TIMEOUT_S:g} after a rank failed, "
        f"{SIGNAL_TIMEOUT_S:g} after a signal). Give more if ranks save a checkpoint when they get a signal.",
    )
    add(
        "--stopped-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="for how long a rank may be suspended (SIGSTOP) until that counts as a failure; 0: for ever "
        "(default: %(default)g)",
    )
    add(
        "--hang-timeout",
        default="auto",
        metavar="SECONDS",
        help="how long a composer Trainer may make no progress until that counts as a failure, for which the stuck "
        "rank and its stack are named; auto: adapts to the run; off: for ever; 120,checkpoint=900: longer for one of "
        f"{', '.join(HANG_PHASES)} (default: %(default)s)",
    )
    add(
        "--health-port",
        type=int,
        metavar="PORT",
        help="serve /healthz, with status 503 if the ranks make no progress, and /metrics for Prometheus on this port",
    )
    add(
        "--health-host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="the address for it; 0.0.0.0 for all, which anyone may then read (default: %(default)s)",
    )
    add(
        "--monitor-interval",
        type=float,
        default=0.1,
        metavar="SECONDS",
        help="how often the ranks are checked (default: %(default)g)",
    )
    add(
        "--signals-to-handle",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        metavar="NAMES",
        help="signals that are passed on to the ranks and end the run (default: %(default)s)",
    )
