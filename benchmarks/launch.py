"""From the start of the launcher to the first collective of its ranks: `composer` against `torchrun`.

The two take turns, and at going first, so that a machine that slows down slows both, and the ratio is that of one
run. Also printed: how long `composer --help` takes.

    python benchmarks/launch.py [--rounds 7] [--ranks 2]
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rows import Row, add_option, write

from composer_dist import get_free_tcp_port

# Each rank says when its first collective has ended. Both launchers run these very lines.
SCRIPT = """
import sys, time
import torch, torch.distributed as tdist
torch.set_num_threads(1)
tdist.init_process_group("gloo")
tdist.all_reduce(torch.ones(1))
if tdist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        file.write(str(time.time()))
tdist.destroy_process_group()
"""
LAUNCHERS = {
    "composer": ["-m", "composer_dist.launch", "--master-port", "{port}", "-n", "{ranks}"],
    "torchrun": ["-m", "torch.distributed.run", "--master-port", "{port}", "--nproc-per-node", "{ranks}"],
}


def seconds_to_collective(launcher: list[str], ranks: int, folder: Path) -> tuple[float, float]:
    """Launch once, and return the seconds until the first collective and until the launcher has ended."""
    script, answer = folder / "script.py", folder / "answer"
    script.write_text(SCRIPT)
    options = [part.format(port=get_free_tcp_port(), ranks=ranks) for part in launcher]
    start = time.time()
    subprocess.run([sys.executable, *options, script, answer], check=True, capture_output=True)
    return float(answer.read_text()) - start, time.time() - start


def seconds_to_help() -> float:
    """Return how long `composer --help` takes."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "composer_dist.launch", "--help"], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure, after one round that warms the disk's cache, and print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="launches of each launcher")
    parser.add_argument("--ranks", type=int, default=2, help="processes of each launch")
    add_option(parser)
    arguments = parser.parse_args()
    rows: list[Row] = []
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in LAUNCHERS}
    helps: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds + 1):
            names = list(LAUNCHERS) if number % 2 else list(reversed(LAUNCHERS))
            for name in names:
                seconds = seconds_to_collective(LAUNCHERS[name], arguments.ranks, Path(folder))
                if number:
                    times[name].append(seconds)
            helps.append(seconds_to_help())
    for label, column in (("first collective", 0), ("whole run", 1)):
        middle = {name: median(pair[column] for pair in pairs) for name, pairs in times.items()}
        ratio = middle["composer"] / middle["torchrun"]
        each = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in middle.items())
        print(f"{label}: {each}, ratio {ratio:.2f}")
        what = f"launching {arguments.ranks} ranks, {label}, to torchrun"
        rows.append(Row(what=what, ours=middle["composer"], plain=middle["torchrun"], unit="s", ratio=ratio))
    print(f"composer --help: {median(helps):.2f} s")
    write(arguments.json, [*rows, Row(what="composer --help", ours=median(helps), unit="s")])


if __name__ == "__main__":
    main()
