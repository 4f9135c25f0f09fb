"""The command `composer report`: write one page about one or several runs."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from composer.report._goodput import summarize
from composer.report.runs import describe_runs, write_described

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page about the runs on the command line, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="composer report", description="Write one page, which needs no network, about one or several runs."
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="folder written by a RunRecorder, or its parent")
    parser.add_argument("-o", "--output", help="file to write (default: report.html in the first folder)")
    parser.add_argument("--json", action="store_true", help="print the data of the page as JSON, and write no page")
    parser.add_argument("--verify", action="store_true", help="verify the hashes of the checkpoints")
    parser.add_argument(
        "--max-points", type=int, help="points per curve, at most (default: 4000, fewer for many curves)"
    )
    asked = parser.parse_args(arguments)
    try:
        folders = [run for folder in asked.folders for run in _runs_in(Path(folder))]
        described = describe_runs(folders, max_points=asked.max_points, verify=asked.verify)
    except (OSError, ValueError) as error:
        return _fail(error)
    for run in described["runs"]:
        if count := run["num_bad_lines"]:
            path = Path(run["folder"], "metrics.jsonl")
            sys.stderr.write(f"composer report: unreadable lines of {path} left out: {count}\n")
    if asked.json:
        sys.stdout.write(json.dumps(described, indent=1) + "\n")
        return 0
    for run in described["runs"]:
        if run["goodput"]:
            sys.stdout.write(f"{run['name']}: {summarize(run['goodput'])}\n")
    output = Path(asked.output or Path(asked.folders[0]) / "report.html")
    try:
        path = write_described(described, output)
    except (OSError, ValueError) as error:
        return _fail(error)
    sys.stdout.write(f"{path}\n")
    return 0


def _fail(error: Exception) -> int:
    sys.stderr.write(f"composer report: error: {error}\n")
    return 2


def _runs_in(folder: Path) -> list[Path]:
    """Return the folder if it holds a run, otherwise all folders below it that do."""
    if (folder / "metrics.jsonl").exists():
        return [folder]
    return sorted(path.parent for path in folder.glob("**/metrics.jsonl")) or [folder]
