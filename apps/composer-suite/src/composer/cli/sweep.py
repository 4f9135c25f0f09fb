"""The command `composer sweep`: train a recipe once for each combination of values, and compare the runs."""

import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

_USAGE = """usage: composer sweep [--dry-run] [LAUNCHER OPTIONS] recipe.yaml KEY=A,B [KEY=1..5 ...] [RECIPE OPTIONS]

Train a recipe once for each combination of values, one run after the other, and write a page that compares the runs.

  KEY=A,B    these values; commas within brackets do not separate
  KEY=1..5   whole numbers from 1 to 5
  --dry-run  print the commands, one a line, for a job array for example

All other options go to the launcher (before the recipe, such as -n 2) or to the recipe (after it).
"""
_NAMED = re.compile("run_name=")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep, and return the exit status: 1 if a run failed."""
    arguments = list(sys.argv[2:] if arguments is None else arguments)
    if "-h" in arguments or "--help" in arguments:
        sys.stdout.write(_USAGE)
        return 0
    at = next((index for index, each in enumerate(arguments) if each.endswith((".yaml", ".yml"))), None)
    if at is None:
        sys.stderr.write(f"{_USAGE}\ncomposer sweep: error: there is no recipe, a file with the ending .yaml.\n")
        return 2
    recipe, launcher = arguments[at], [each for each in arguments[:at] if each != "--dry-run"]
    folder = next((Path(launcher[index + 1]) for index, each in enumerate(launcher[:-1]) if each == "--runs"), None)
    if folder is None:
        folder = Path("runs", f"{Path(recipe).stem}-sweep")
        launcher += ["--runs", str(folder)]
    commands = {name: [*launcher, recipe, *changes] for name, changes in named_runs(arguments[at + 1 :]).items()}
    if "--dry-run" in arguments[:at]:
        sys.stdout.write("".join(f"composer {shlex.join(command)}\n" for command in commands.values()))
        return 0
    failed = [name for name, command in commands.items() if not _runs(name, command)]
    _compare(folder)
    if failed:
        sys.stderr.write(f"composer sweep: these runs failed: {', '.join(failed)}.\n")
    return 1 if failed else 0


def _compare(folder: Path) -> None:
    if list(folder.glob("*")):
        from composer.report.cli import main as report

        report([str(folder), "-o", str(folder / "report.html")])


def _runs(name: str, command: Sequence[str]) -> bool:
    sys.stdout.write(f"sweep: {name}\n")
    sys.stdout.flush()
    return subprocess.run([sys.executable, "-m", "composer_dist.launch", *command], check=False).returncode == 0


def named_runs(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the arguments of each run by a name, which is the name of the run unless the arguments give one."""
    names: Counter[str] = Counter()
    runs: dict[str, list[str]] = {}
    for changes in combinations(arguments):
        name = re.sub(r"[^\w.=-]+", "_", "-".join(each for each in changes if each not in arguments)) or "run"
        names[name] += 1
        name += f"-{names[name]}" if names[name] > 1 else ""
        runs[name] = [*changes, *([] if any(map(_NAMED.match, changes)) else [f"run_name={name}"])]
    return runs


def combinations(arguments: Sequence[str]) -> list[list[str]]:
    """Return the arguments of each run, each combination once."""
    return [list(each) for each in dict.fromkeys(product(*map(_choices, arguments)))]


def _choices(argument: str) -> list[str]:
    key, separator, text = argument.partition("=")
    if not separator or key.startswith("-"):
        return [argument]
    if found := _RANGE.fullmatch(text):
        first, last = int(found[1]), int(found[2])
        step = 1 if first <= last else -1
        return [f"{key}={number}" for number in range(first, last + step, step)]
    return [f"{key}={value.strip()}" for value in _split(text)]


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
