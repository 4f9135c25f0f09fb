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
    is_dry = "--dry-run" in arguments[:at]
    launcher = [each for each in arguments[:at] if each != "--dry-run"]
    runs = next((launcher[index + 1] for index, each in enumerate(launcher[:-1]) if each == "--runs"), None)
    folder = Path(runs) if runs is not None else Path("runs", f"{Path(arguments[at]).stem}-sweep")
    launcher += [] if runs is not None else ["--runs", str(folder)]
    failed: list[str] = []
    names: Counter[str] = Counter()
    for changes in combinations(arguments[at + 1 :]):
        varied = [each for each in changes if each not in arguments]
        name = re.sub(r"[^\w.=-]+", "_", "-".join(varied)) or "run"
        names[name] += 1
        name += f"-{names[name]}" if names[name] > 1 else ""
        own = [] if any(each.startswith("run_name=") for each in changes) else [f"run_name={name}"]
        command = [*launcher, arguments[at], *changes, *own]
        if is_dry:
            sys.stdout.write(f"composer {shlex.join(command)}\n")
            continue
        sys.stdout.write(f"sweep: {name}\n")
        sys.stdout.flush()
        if subprocess.run([sys.executable, "-m", "composer_dist.launch", *command], check=False).returncode:
            failed.append(name)
    if not is_dry:
        if list(folder.glob("*")):
            from composer.report.cli import main as report

            report([str(folder), "-o", str(folder / "report.html")])
        if failed:
            sys.stderr.write(f"composer sweep: these runs failed: {', '.join(failed)}.\n")
    return 1 if failed else 0


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
