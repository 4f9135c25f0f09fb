"""Race a recipe to the target of its task, against the record.

    python examples/recipes/race.py examples/recipes/entries/stdlib_1.py --seeds 5

A recipe is a file with `TASK`, that of `stdlib.py` or `glyphs.py`, and `RECIPE`, an `Arm` with its learning rate. Each
seed trains the record and the recipe, one after the other, so that both see the same machine. The time of a run is that
of its whole training, whose last evaluation must be at the target.
"""

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from arms import Arm, Point, Task
from records import describe_machine
from scipy import stats

ENTRIES = Path(__file__).parent / "entries"
LOGS = Path(__file__).parent / "results" / "race"
CONFIDENCE = 0.99
MIN_SEEDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A recipe that races.

    Args:
        path: Its file.
        source: What the file contained when the recipe was loaded.
        task: What it is trained for.
        arm: How it is trained.
        parts: Take one thing that it is made of out of an arm, by their names.
        learning_rates: What it is tuned with when its parts are taken out.
    """

    path: Path
    source: str
    task: Task
    arm: Arm
    parts: Mapping[str, Callable[[Arm], Arm]]
    learning_rates: tuple[float, ...]

    @classmethod
    def load(cls, path: Path) -> "Entry":
        """Import the file of a recipe.

        Raises:
            ValueError: If it does not define `TASK` and `RECIPE`, or the recipe has no learning rate.
        """
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.exists():
            raise ValueError(f"{path} is not a Python file. Pass the file of a recipe, such as {ENTRIES}/stdlib_1.py.")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        task, arm = getattr(module, "TASK", None), getattr(module, "RECIPE", None)
        if not isinstance(task, Task) or not isinstance(arm, Arm) or arm.lr is None:
            raise ValueError(f"{path} must define TASK, a Task, and RECIPE, an Arm with a learning rate (lr).")
        return cls(
            path=path,
            source=path.read_text(),
            task=task,
            arm=arm,
            parts=getattr(module, "PARTS", {}),
            learning_rates=getattr(module, "LEARNING_RATES", (arm.lr,)),
        )

    def train(self, seed: int) -> list[Point]:
        """Train once."""
        assert self.arm.lr is not None
        return self.task.train(self.arm, self.arm.lr, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a race has shown.

    Args:
        seconds: CPU-seconds of each training with the recipe.
        reference_seconds: Those of the record with the same seeds.
        qualities: Of the recipe, at the end.
        num_reached: How many of them are at the target.
        p: p-value of a one-sided t-test that the mean quality is better than the target.
        ratio: Of the recipe's CPU-seconds to those of the record, the median of the seeds.
        ratio_bound: Upper 99% confidence bound of the geometric mean ratio, by the t distribution.
    """

    seconds: list[float]
    reference_seconds: list[float]
    qualities: list[float]
    num_reached: int
    p: float
    ratio: float
    ratio_bound: float

    @property
    def is_record(self) -> bool:
        """Whether every seed reached the target, both bounds hold, and there are enough seeds."""
        is_reached = self.num_reached == len(self.qualities) >= MIN_SEEDS
        return is_reached and self.p < 1 - CONFIDENCE and self.ratio_bound < 1


def race(entry: Entry, reference: Entry, seeds: Sequence[int]) -> dict[str, Any]:
    """Train both with each seed, and return the log: recipes with their source, versions, seeds and curves.

    Raises:
        ValueError: If they have different tasks.
    """
    if entry.task.name != reference.task.name:
        raise ValueError(
            f"{entry.path.name} is a recipe for {entry.task.name}, and {reference.path.name} one for "
            f"{reference.task.name}. Pass a record of the same task with --against."
        )
    # CPU-seconds of several threads would count how long they wait for each other.
    torch.set_num_threads(1)
    curves: list[tuple[list[Point], list[Point]]] = []
    for seed in seeds:
        curves.append((reference.train(seed), entry.train(seed)))
        shown = [f"{seconds:.1f} s, {entry.task.format(quality)}" for (*_, (seconds, quality)) in curves[-1]]
        print(f"seed {seed}: {reference.path.stem} {shown[0]}; {entry.path.stem} {shown[1]}", file=sys.stderr)
    return {
        "task": entry.task.name,
        "setup": entry.task.setup,
        "target": entry.task.target,
        "is_better_higher": entry.task.is_better_higher,
        "machine": describe_machine(),
        "versions": {name: version(name) for name in ("composer-suite", "torch", "transformers", "numpy")},
        "seeds": list(seeds),
        "reference": _describe(reference, [pair[0] for pair in curves]),
        "recipe": _describe(entry, [pair[1] for pair in curves]),
    }


def _describe(entry: Entry, curves: list[list[Point]]) -> dict[str, Any]:
    return {
        "file": entry.path.name,
        "name": entry.arm.name,
        "duration": entry.arm.duration,
        "lr": entry.arm.lr,
        "source": entry.source,
        "curves": curves,
    }


def evaluate(log: Mapping[str, Any]) -> Result:
    """Return what a log shows."""
    ends = {who: [curve[-1] for curve in log[who]["curves"]] for who in ("reference", "recipe")}
    seconds, reference_seconds = ([second for second, _ in ends[who]] for who in ("recipe", "reference"))
    qualities, target = [quality for _, quality in ends["recipe"]], log["target"]
    ratios = [mine / theirs for mine, theirs in zip(seconds, reference_seconds, strict=True)]
    is_higher = log["is_better_higher"]
    # With one seed there is no variance, and neither test says anything.
    p, bound = 1.0, math.inf
    if len(ratios) > 1:
        test: Any = stats.ttest_1samp(qualities, target, alternative="greater" if is_higher else "less")
        p = float(test.pvalue)
        test = stats.ttest_1samp([math.log(ratio) for ratio in ratios], 0.0, alternative="less")
        bound = math.exp(test.confidence_interval(CONFIDENCE).high)
    return Result(
        seconds=seconds,
        reference_seconds=reference_seconds,
        qualities=qualities,
        num_reached=sum((quality >= target) if is_higher else (quality <= target) for quality in qualities),
        p=p,
        ratio=median(ratios),
        ratio_bound=bound,
    )


def newest_record(task: Task, *, but: Path) -> Path:
    """Return the newest recipe for a task in the folder of entries, other than one."""
    others = [path for path in ENTRIES.glob(f"{task.name}_*.py") if path.resolve() != but.resolve()]
    return max(others, key=lambda path: int(path.stem.rpartition("_")[2]))


def main() -> int:
    """Read the command line, race, write the log, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", type=Path, help="a Python file with TASK and RECIPE")
    parser.add_argument("--seeds", type=int, default=MIN_SEEDS, help="how many runs both have")
    parser.add_argument("--against", type=Path, help="the recipe of the record; by default the newest one")
    parser.add_argument("--log", type=Path, help="where the log goes; results/race/RECIPE.json by default")
    arguments = parser.parse_args()
    try:
        entry = Entry.load(arguments.recipe)
        reference = Entry.load(arguments.against or newest_record(entry.task, but=entry.path))
        log = race(entry, reference, range(arguments.seeds))
    except ValueError as error:
        parser.error(str(error))
    path = arguments.log or LOGS / f"{entry.path.stem}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(log, indent=1) + "\n")
    result = evaluate(log)
    print(
        f"{entry.arm.name}: {median(result.seconds):.2f} CPU-s to {entry.task.format(entry.task.target)}, "
        f"reached with {result.num_reached} of {len(result.qualities)} seeds (p = {result.p:.2g}).\n"
        f"{result.ratio:.3f} times {reference.path.stem} ({reference.arm.name}), below {result.ratio_bound:.3f} with "
        f"{CONFIDENCE:.0%} confidence: {'a record' if result.is_record else 'not a record'}. Log: {path}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
