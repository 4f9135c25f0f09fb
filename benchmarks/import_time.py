"""What `import composer` costs beside `import torch`: processor time of each import in fresh interpreters.

The imports take turns, so that a machine that slows down slows all of them, and the ratios are those of one run.

    python benchmarks/import_time.py [rounds] [--json PATH]
"""

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median

from rows import Row, add_option, write

TORCH = "import torch"
# What is loaded before the clock starts, and what is measured.
CASES = (
    ("", TORCH),
    ("", "import composer"),
    (TORCH, "import composer"),
    ("", "import composer.core"),
    ("", "from composer.core import Event, State"),
    ("", "from composer import Trainer"),
    (TORCH, "from composer import Trainer"),
)
PROGRAM = "{}\nimport time; start = time.process_time()\n{}\nprint(time.process_time() - start)"


def processor_time_s(before: str, statement: str) -> float:
    """Run a statement in an interpreter of its own and return the processor time that it took."""
    command = [sys.executable, "-c", PROGRAM.format(before, statement)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(rounds: int, path: Path | None) -> None:
    """Measure, after one round that warms the disk's cache, and print the table."""
    rows: list[Row] = []
    times: dict[tuple[str, str], list[float]] = {case: [] for case in CASES}
    for number in range(rounds + 1):
        for case in CASES:
            seconds = processor_time_s(*case)
            if number:
                times[case].append(seconds)
    torch_s = median(times["", TORCH])
    print(f"{'statement':44}{'median':>12}{'lowest':>12}{'of torch':>10}")
    for (before, statement), seconds in times.items():
        label = f"{statement} (torch loaded)" if before else statement
        middle = median(seconds)
        print(f"{label:44}{middle * 1e3:9.1f} ms{min(seconds) * 1e3:9.1f} ms{middle / torch_s:10.4f}")
        if statement != TORCH:
            rows.append(Row(what=label, ours=middle * 1e3, plain=torch_s * 1e3, ratio=middle / torch_s))
    write(path, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure what importing composer costs beside importing torch.")
    parser.add_argument("rounds", type=int, nargs="?", default=7)
    add_option(parser)
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.json)
