"""Provoke faults at random moments in runs of two or three ranks, and compare what the launcher says with the fault.

    python tools/hang_soak.py --count 60 --seed 1

It prints a table of the verdicts by kind of fault with the time that they took beyond the timeout, and the output of
the launcher for each wrong one, and then exits with status 1.
"""

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "tests" / "hangs" / "faulty_script.py"
# What the report says of the stuck rank.
CAUSES = {
    "loop": "is running in get_stuck",
    "sleep": "is waiting in get_stuck",
    "stop": "is suspended (SIGSTOP)",
    "pipe": "is waiting in a save or a load in get_stuck",
    "order": "",
    "worker": "waits for a worker of its dataloader",
    "leave": "ended with exit code 0",
}
EVENTS = ("batch_start", "before_forward", "after_forward", "before_backward", "after_backward", "batch_end")
LIMIT_S = 240.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one rank, and its moment."""

    number: int
    kind: str
    num_ranks: int
    rank: int
    batch: int
    moment: str


def draw(count: int, seed: int) -> list[Fault]:
    """Return faults of all kinds in equal shares, of random ranks at random moments."""
    chance = random.Random(seed)
    faults = list[Fault]()
    for number in range(count):
        kind, num_ranks = list(CAUSES)[number % len(CAUSES)], chance.choice((2, 3))
        # At any moment of the main thread within a few batches, or on an event.
        moment = chance.choice((f"{chance.uniform(0.001, 0.1):.4f}", chance.choice(EVENTS)))
        if kind == "order":  # a collective out of order in the middle of another one is not a program that exists
            moment = chance.choice(EVENTS)
        faults.append(Fault(number, kind, num_ranks, chance.randrange(num_ranks), chance.randrange(2, 25), moment))
    return faults


def provoke(fault: Fault, timeout_s: float) -> tuple[bool, float, str]:
    """Return whether the verdict is right, its time beyond the timeout in seconds, and what the launcher said."""
    with tempfile.TemporaryDirectory(prefix="hang_soak_") as folder:
        environ = os.environ | {
            "COMPOSER_RUNS": f"{folder}/runs",
            "TMPDIR": folder,
            "OMP_NUM_THREADS": "1",
            "FAULT_AT": fault.moment,
        }
        command = [sys.executable, "-m", "composer_dist.launch", "-n", str(fault.num_ranks), "--stopped-timeout", "0"]
        command += ["--hang-timeout", str(timeout_s), str(SCRIPT), fault.kind, str(fault.rank), str(fault.batch)]
        lines, told_s = list[str](), 0.0
        with subprocess.Popen([*command, folder], env=environ, stderr=subprocess.PIPE, text=True) as launcher:
            timer = threading.Timer(LIMIT_S, launcher.kill)
            timer.start()
            assert launcher.stderr is not None
            for line in launcher.stderr:
                lines.append(line)
                told_s = told_s or (time.time() if "composer: stuck:" in line else 0.0)
            launcher.wait()
            timer.cancel()
        began = Path(folder, "began")
        over_s = told_s - began.stat().st_mtime - timeout_s if told_s and began.exists() else float("nan")
        said = "".join(lines)
        return is_right(fault, said) and launcher.returncode != 0, over_s, said


def is_right(fault: Fault, said: str) -> bool:
    """Return whether a report names the faulty rank alone, with its cause."""
    stuck = {int(rank) for rank in re.findall(r"composer: stuck: rank (\d+) ", said)}
    if fault.kind == "order":  # of two ranks, either one may be wrong
        named = re.search(rf"different collectives: .*rank {fault.rank}: broadcast", said)
        return named is not None and stuck == ({0, 1} if fault.num_ranks == 2 else {fault.rank})
    return stuck == {fault.rank} and f"stuck: rank {fault.rank} {CAUSES[fault.kind]}" in said


def main() -> int:
    """Provoke the faults and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="the number of faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds without progress")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--only", type=int, nargs="*", help="the numbers of single faults")
    options = parser.parse_args()
    faults = [each for each in draw(options.count, options.seed) if not options.only or each.number in options.only]
    found = dict[str, list[tuple[bool, float]]]()
    with ThreadPoolExecutor(options.jobs) as pool:
        for fault, (right, over_s, said) in zip(
            faults, pool.map(lambda each: provoke(each, options.timeout), faults), strict=True
        ):
            found.setdefault(fault.kind, []).append((right, over_s))
            print(f"{fault}: {'right' if right else 'WRONG'}, {over_s:.1f} s over", flush=True)
            if not right:
                print(said, flush=True)
    print(f"\n{'fault':8} {'right':>7} {'median s over':>14} {'most':>6}")
    for kind, results in found.items():
        overs = [over_s for _, over_s in results if over_s == over_s]
        rights = f"{sum(right for right, _ in results)}/{len(results)}"
        print(f"{kind:8} {rights:>7} {statistics.median(overs or [0.0]):14.1f} {max(overs, default=0.0):6.1f}")
    return 0 if all(right for results in found.values() for right, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
