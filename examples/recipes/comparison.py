"""Run a comparison: tune every arm with the same learning rates, then train each with several seeds.

Each run is written down when it is done, and not repeated: the command can be stopped and called again.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from arms import Arm, Comparison
from records import TUNING_SEED, Records, Run
from tables import render

RESULTS = Path(__file__).parent / "results"


def main(comparison: Comparison, doc: str | None, render: Callable[[Comparison, Records], str] = render) -> int:
    """Read the command line of a recipe, run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="how many runs each arm has, after its tuning")
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="only these: " + _names(comparison))
    parser.add_argument("--also-lr", nargs="+", type=float, default=(), help="tune with these learning rates as well")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--records", type=Path, default=RESULTS / f"{comparison.name}.jsonl", help="where runs go")
    arguments = parser.parse_args()
    if unknown := set(arguments.arms or ()) - {arm.name for arm in comparison.arms}:
        parser.error(f"--arms has {sorted(unknown)}, which are none of {_names(comparison)}")
    comparison = replace(comparison, learning_rates=(*arguments.also_lr, *comparison.learning_rates))
    # CPU-seconds of several threads would count how long they wait for each other.
    torch.set_num_threads(1)
    records = Records(arguments.records, comparison)
    records.check_machine()
    last_start = time.monotonic() + 60 * arguments.minutes
    for arm, lr, seed in missing_runs(comparison, records, arguments.seeds, arguments.arms):
        if time.monotonic() > last_start:
            print("The time is up: call the command again for the rest.")
            return 0
        _say(records.add(arm, lr, seed, comparison.task.train(arm, lr, seed)))
    print(render(comparison, records))
    return 0


def missing_runs(
    comparison: Comparison, records: Records, num_seeds: int, names: list[str] | None = None
) -> Iterator[tuple[Arm, float, int]]:
    """Yield the runs that are not done yet: first those of tuning, then seed by seed those of all arms.

    An arm that follows another one's learning rate is left out as long as that one has not been tuned.

    Args:
        comparison: The arms.
        records: What is done. Has to be kept up to date in between.
        num_seeds: How many seeds each arm has, counted from 0.
        names: Of the arms that are wanted. All when `None`.
    """
    arms = [arm for arm in comparison.arms if names is None or arm.name in names]
    for lr in comparison.learning_rates:
        for arm in arms:
            if arm.like is None and records.find(arm, lr, TUNING_SEED) is None:
                yield arm, lr, TUNING_SEED
    for seed in range(num_seeds):
        for arm in arms:
            lr = records.best_lr(arm)
            if lr is not None and records.find(arm, lr, seed) is None:
                yield arm, lr, seed


def _names(comparison: Comparison) -> str:
    return ", ".join(f"'{arm.name}'" for arm in comparison.arms)


def _say(run: Run) -> None:
    seed = "tuning" if run.seed == TUNING_SEED else f"seed {run.seed}"
    curve = " ".join(f"{seconds:.1f}s:{quality:.3f}" for seconds, quality in run.curve)
    print(f"{run.arm}, lr {run.lr:g}, {seed}: {curve}", file=sys.stderr, flush=True)
