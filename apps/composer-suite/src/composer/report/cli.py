"""The command `composer report`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from composer.report.description import describe_runs

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page about the runs that the command line names, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="composer report", description="Write one page, which needs no network, about one or several runs."
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="what a RunRecorder has written, or its parent")
    parser.add_argument("-o", "--output", help="where the page goes (default: report.html in the first folder)")
    parser.add_argument("--json", action="store_true", help="print what the page would show, and write none")
    parser.add_argument("--verify", action="store_true", help="compare every byte of the checkpoints with their hashes")
    parser.add_argument("--max-points", type=int, default=4000, help="points of a curve at most (default: 4000)")
    asked = parser.parse_args(arguments)
    folders = [run for folder in asked.folders for run in _runs_in(Path(folder))]
    try:
        described = describe_runs(folders, max_points=asked.max_points, verify=asked.verify)
        if asked.json:
            sys.stdout.write(json.dumps(described, indent=1) + "\n")
            return 0
        from composer.report.page import write_described  # the data can be had without plotly

        path = write_described(described, asked.output or folders[0] / "report.html")
    except (ImportError, OSError, ValueError) as error:
        sys.stderr.write(f"composer report: error: {error}\n")
        return 2
    sys.stdout.write(f"{path}\n")
    return 0


def _runs_in(folder: Path) -> list[Path]:
    """Return the folder, or those inside it that hold a run if it holds none itself."""
    if (folder / "metrics.jsonl").exists():
        return [folder]
    return sorted(path.parent for path in folder.glob("**/metrics.jsonl")) or [folder]
