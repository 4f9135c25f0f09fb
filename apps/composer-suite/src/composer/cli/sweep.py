"""The command `composer sweep`: train a recipe once for each combination of values, and compare the runs."""

import argparse
import datetime
import json
import os
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer.report.runs import CONFIG, METRICS, STATUS, read_json, write_page
from composer_dist.launch.args import parse_options
from composer_dist.launch.main import main as launch
from composer_dist.launch.topology import child_command

if TYPE_CHECKING:
    from composer.recipe import Plan

_USAGE = (
    "composer sweep [--dry-run] [--optuna N --minimize METRIC] [LAUNCHER OPTIONS] recipe.yaml KEY=A,B [KEY=1..5 ...]"
)
_DESCRIPTION = """\
Train a recipe once for each combination of values, one run after the other, and write a page that compares the runs.

  KEY=A,B         these values; commas within brackets do not separate
  KEY=1..5        whole numbers from 1 to 5
  KEY=0.1..0.5    with --optuna, a number between these
  KEY=1e-4..1e-2  with --optuna, the same on a logarithmic scale

Other options go to the launcher (before the recipe, such as -n 2) or to the recipe (after it). The same command again
trains only what has not finished.

Exit status: 0 if every run has finished; 1 if one has failed, after the others; 2 for an invalid command line, before
any run; 128 + s if signal s has ended the sweep.
"""
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")
_NAMED = re.compile("run_name=")
_DONE = ("finished", "stopped early")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="composer sweep",
        usage=_USAGE,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # other options are those of the launcher
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands, one a line, for a job array")
    parser.add_argument("--optuna", type=int, metavar="N", help="choose the values of N runs with Optuna")
    goal = parser.add_mutually_exclusive_group()
    for direction in ("minimize", "maximize"):
        goal.add_argument(f"--{direction}", metavar="METRIC", help="with --optuna, such as metrics/eval/CrossEntropy")
    asked, command = parser.parse_known_args(arguments)
    direction, metric = ("minimize", asked.minimize) if asked.minimize else ("maximize", asked.maximize)
    if (asked.optuna is None) != (metric is None):
        parser.error("--optuna N needs --minimize METRIC or --maximize METRIC, and the other way around.")
    if asked.optuna is not None and (asked.optuna < 1 or asked.dry_run):
        parser.error("--optuna must be 1 or more, without --dry-run.")
    try:
        sweep = Sweep(command)
        if asked.optuna is None:
            return _train_all(sweep, dry_run=asked.dry_run)
        from composer.cli._study import search

        return search(sweep, asked.optuna, direction, metric)
    except (ImportError, OSError, ValueError) as error:
        sys.stderr.write(f"composer sweep: error: {error}\n")
        return 2


def _train_all(sweep: "Sweep", *, dry_run: bool) -> int:
    runs = named_runs(sweep.arguments)
    plans = {name: sweep.plan(changes) for name, changes in runs.items()}  # errors before anything trains
    missing = [name for name, plan in plans.items() if sweep.finished(plan) is None]
    if len(missing) < len(runs):
        sys.stderr.write(f"composer sweep: finished already: {len(runs) - len(missing)} of {len(runs)} runs.\n")
    if dry_run:
        sys.stdout.write("".join(f"composer {shlex.join(sweep.command(runs[name]))}\n" for name in missing))
        return 0
    failed: list[str] = []
    for name in missing:
        status = sweep.train(name, runs[name], plans[name])
        if sweep.is_interruption(status):
            return sweep.end(failed, status)
        if status:
            failed.append(name)
    return sweep.end(failed)


class Sweep:
    """The runs of one recipe, in one folder.

    Args:
        command: The arguments of the launcher, the recipe, and its arguments.

    Attributes:
        arguments: The arguments of the recipe.
        folder: The folder of the runs.

    Raises:
        ValueError: If the command runs no recipe, or without folders of runs.
    """

    def __init__(self, command: Sequence[str]) -> None:
        options = parse_options(command)
        recipe = options.training_script
        if not recipe.endswith((".yaml", ".yml")):
            raise ValueError(f"{recipe!r} must be a recipe, a file with the ending .yaml.")
        if options.no_runs:
            raise ValueError("--no-runs cannot be combined with a sweep, which compares the folders of its runs.")
        num_before = len(command) - len(options.training_script_args)
        self.folder = Path(options.runs or Path("runs", f"{Path(recipe).stem}-sweep"))
        self.arguments = list(command[num_before:])
        self._start = [*([] if options.runs else ["--runs", str(self.folder)]), *command[:num_before]]
        self._interruptions = [128 + signal.Signals[name.strip()] for name in options.signals_to_handle.split(",")]

    def command(self, changes: Sequence[str]) -> list[str]:
        """Return the arguments of the launcher for a run."""
        return [*self._start, *changes]

    def plan(self, changes: Sequence[str]) -> "Plan":
        """Return the checked recipe of a run.

        Raises:
            RecipeError: If it is not valid.
        """
        from composer.recipe.__main__ import parse  # loads torch

        return parse(child_command(parse_options(self.command(changes)), os.environ)[1:])[0]

    def finished(self, plan: "Plan") -> Path | None:
        """Return the folder of a run that has finished with the same recipe, or `None`."""
        name = str(plan.values["run_name"])
        for folder, _ in _kept((self.folder / name).parent, name):
            recipe = folder / "recipe.yaml"
            if _is_done(folder) and recipe.is_file() and recipe.read_text(encoding="utf-8") == plan.text:
                return folder
        return None

    def train(self, name: str, changes: Sequence[str], plan: "Plan") -> int:
        """Train one run, and return its exit status. If it fails, its folder says so."""
        sys.stdout.write(f"sweep: {name}\n")
        sys.stdout.flush()
        started = datetime.datetime.now(datetime.UTC).isoformat()
        # In this process, so that signals reach the launcher and not only its parent.
        if status := launch(self.command(changes)):
            self._note(plan, status, started)
        return status

    def is_interruption(self, status: int) -> bool:
        """Return whether an exit status is that of a signal which the launcher handles."""
        return status in self._interruptions

    def end(self, failed: Sequence[str], status: int = 0) -> int:
        """Write the page, and return the exit status."""
        if shown := self._shown():
            sys.stdout.write(f"{write_page(shown, self.folder / 'report.html')}\n")
        if failed:
            sys.stderr.write(f"composer sweep: failed: {', '.join(failed)}. The same command trains what is missing.\n")
        return status or (1 if failed else 0)

    def _shown(self) -> list[Path]:
        """Return the folders of all runs, without failed ones of which there is a later one."""
        runs: dict[str, list[Path]] = {}
        for folder, name in _kept(self.folder):
            runs.setdefault(name, []).append(folder)
        return [each for folders in runs.values() for each in folders if _is_done(each) or each == folders[-1]]

    def _note(self, plan: "Plan", status: int, started: str) -> None:
        """Write the failure of a run into its folder, which a run that was killed, or never began, does not."""
        name = str(plan.values["run_name"])
        folders = [folder for folder, _ in _kept((self.folder / name).parent, name)]
        folder = next((each for each in folders if read_json(each / STATUS).get("updated", "") >= started), None)
        if folder is None:
            folder = self.folder / name
            numbers = count(2)
            while folder.exists():
                folder = self.folder / f"{name}-{next(numbers)}"
            folder.mkdir(parents=True)
            (folder / METRICS).touch()
            (folder / CONFIG).write_text(json.dumps({"run_name": name}))
            (folder / "recipe.yaml").write_text(plan.text, encoding="utf-8")
        facts = {"status": "running", "started": started, "updated": started, **read_json(folder / STATUS)}
        if facts["status"] == "running":
            facts["status"] = "failed"
        facts["error"] = facts.get("error") or f"The run ended with exit status {status}. Its output has the cause."
        (folder / STATUS).write_text(json.dumps(facts, indent=1))


def _kept(folder: Path, name: str | None = None) -> Iterator[tuple[Path, str]]:
    """Yield the folders of runs, the oldest first, with the names of the runs: those below, or here those of a name."""
    found = [path.parent for path in folder.glob("**/config.json" if name is None else "*/config.json")]
    for each in sorted(found, key=lambda each: str(read_json(each / STATUS).get("started"))):
        own = str(read_json(each / CONFIG).get("run_name"))
        if (each / METRICS).exists() and name in (None, own):
            yield each, own


def _is_done(folder: Path) -> bool:
    status: Mapping[str, Any] = read_json(folder / STATUS)
    return status.get("status") in _DONE and not status.get("error")


def named_runs(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the arguments of each run by a name, which is the name of the run unless the arguments give one."""
    names: Counter[str] = Counter()
    runs: dict[str, list[str]] = {}
    for changes in dict.fromkeys(product(*map(_choices, arguments))):
        name = re.sub(r"[^\w.=-]+", "_", "-".join(each for each in changes if each not in arguments)) or "run"
        names[name] += 1
        name += f"-{names[name]}" if names[name] > 1 else ""
        runs[name] = [*changes, *([] if any(map(_NAMED.match, changes)) else [f"run_name={name}"])]
    return runs


def _choices(argument: str) -> list[str]:
    key, values = split_values(argument)
    if values is None:
        return [argument]
    if isinstance(values, list):
        return [f"{key}={value}" for value in values]
    first, last = values.first, values.last
    if not (isinstance(first, int) and isinstance(last, int)):
        raise ValueError(f"{argument!r} must be whole numbers, or values such as {key}=0.1,0.2, without --optuna.")
    step = 1 if first <= last else -1
    return [f"{key}={number}" for number in range(first, last + step, step)]


@dataclass(frozen=True)
class Range:
    """The numbers from one to another; `is_log` if they are written as `1e-4`."""

    first: float
    last: float
    is_log: bool


def split_values(argument: str) -> tuple[str, list[str] | Range | None]:
    """Return the key of an argument and its values, which are `None` for an option."""
    key, separator, text = argument.partition("=")
    if not separator or key.startswith("-"):
        return key, None
    if found := _RANGE.fullmatch(text):
        first, last = (int(end) if end.lstrip("+-").isdecimal() else float(end) for end in found.groups())
        return key, Range(first, last, is_log="e" in text.lower() and first > 0 and last > 0)
    return key, [value.strip() for value in _split(text)]


def _split(text: str) -> list[str]:
    """Split at the commas that are in no brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
