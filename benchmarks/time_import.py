"""Measure what importing composer_time adds to starting Python, and fail if it is over its budget.

    time_import.py [--runs N]

Each statement runs in fresh processes, in turn with the others so that a busy moment of the machine meets all of them,
with compiled bytecode in place as an installed package has it. The table shows medians. The budget is for processor
time, which leaves out the waiting for a core that others hold; on an idle machine it is the wall-clock time as well.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from resource import RUSAGE_CHILDREN, getrusage

from rows import Row, add_option, write

BUDGET_MS = 15.0
BARE = "pass"
COUNTED = ("import composer_time", "from composer_time import Time, Timestamp")
STATEMENTS = (BARE, *COUNTED, "import enum, datetime")  # the last for comparison: the bulk of it


def processor_seconds() -> float:
    """Return the processor time of all child processes that have ended."""
    usage = getrusage(RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def milliseconds(statement: str, bytecode: str) -> tuple[float, float]:
    """Return the processor time and the wall-clock time that a fresh Python takes to run one statement."""
    command = [sys.executable, "-I", "-X", f"pycache_prefix={bytecode}", "-c", statement]
    processor, wall = processor_seconds(), time.perf_counter()
    subprocess.run(command, check=True)
    return (processor_seconds() - processor) * 1e3, (time.perf_counter() - wall) * 1e3


def medians(runs: int) -> dict[str, tuple[float, float]]:
    """Return the median processor and wall-clock time of every statement."""
    with tempfile.TemporaryDirectory() as bytecode:
        for statement in STATEMENTS:
            milliseconds(statement, bytecode)  # compiles
        rounds = [[milliseconds(statement, bytecode) for statement in STATEMENTS] for _ in range(runs)]
    table: dict[str, tuple[float, float]] = {}
    for statement, samples in zip(STATEMENTS, zip(*rounds, strict=True), strict=True):
        processor, wall = zip(*samples, strict=True)
        table[statement] = statistics.median(processor), statistics.median(wall)
    return table


def main() -> int:
    """Print the table and return the exit status."""
    parser = argparse.ArgumentParser(description="Measure the import time of composer_time.")
    parser.add_argument("--runs", type=int, default=25, help="processes per statement")
    add_option(parser)
    arguments = parser.parse_args()
    table = medians(arguments.runs)
    bare, bare_wall = table[BARE]
    print(f"{'':44} {'-- processor, ms --':>24} {'--- wall, ms ---':>18}")
    print(f"{'statement':44} {'all':>7} {'over bare':>9} {'ratio':>6} {'all':>7} {'over bare':>10}")
    for statement, (taken, wall) in table.items():
        print(
            f"{statement:44} {taken:7.1f} {taken - bare:9.1f} {taken / bare:6.2f} {wall:7.1f} {wall - bare_wall:10.1f}"
        )
    worst = max(table[statement][0] for statement in COUNTED) - bare
    kept = worst <= BUDGET_MS
    print(f"budget: {BUDGET_MS:.0f} ms over bare Python, {'kept' if kept else 'BROKEN'} at {worst:.1f} ms")
    what = f"{COUNTED[-1]}, over bare Python"
    write(arguments.json, [Row(what=what, ours=worst, budget=f"{BUDGET_MS:.0f} ms", is_met=kept)])
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
