"""The command `composer race`: train a recipe to the target of its task, and compare its time with the record's.

A recipe is a Python file with `TASK`, a `Task`, and `RECIPE`, an `Arm` with its learning rate. Each seed trains the
record and the recipe, one after the other and in alternating order, so that both see the same machine. The time of a
run is that of its whole training, whose last evaluation must be at the target.
"""

import argparse
import importlib.util
import json
import math
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from statistics import median
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from composer_events import Algorithm

__all__ = ["Arm", "Entry", "Point", "Result", "Task", "describe_machine", "evaluate", "main", "race"]

CONFIDENCE = 0.99
MIN_SEEDS = 5
_VERSIONS = ("composer-suite", "torch", "transformers", "numpy")

# CPU-seconds of training so far, and the quality that an evaluation found then.
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to train.

    Args:
        name: What the tables call it.
        duration: How long it trains, such as `'6ep'`. Arms that are meant to take equally long differ in this, because
            their steps do.
        algorithms: Makes the algorithms, new ones for each run.
        optimizer: Called with the model and `lr`, such as `partial(Muon, weight_decay=0.0)`. The task's own if `None`.
        settings: Options of the task's loader, such as `batch_size`, and of the Trainer, such as `precision`.
        like: Another arm, whose learning rate this one takes, such as the same training for another length of time.
        lr: The learning rate of a recipe that is not tuned any more.
    """

    name: str
    duration: str
    algorithms: "Callable[[], list[Algorithm]]" = list
    optimizer: "Callable[..., Optimizer] | None" = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    like: str | None = None
    lr: float | None = None

    def describe(self) -> str:
        """Describe the settings of this arm."""
        algorithms = ", ".join(map(repr, self.algorithms())) or "no algorithms"
        settings = "".join(f", {name}={value!r}" for name, value in sorted(self.settings.items()))
        if isinstance(optimizer := self.optimizer, partial):
            options = ", ".join(f"{name}={value!r}" for name, value in optimizer.keywords.items())
            settings += f", {optimizer.func.__name__}({options})"
        elif optimizer is not None:
            settings += f", {optimizer.__name__}"
        return f"{self.duration}, {algorithms}{settings}"

    def split_settings(self, *of_loader: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the settings of these names, and the others."""
        chosen = {name: value for name, value in self.settings.items() if name in of_loader}
        return chosen, {name: value for name, value in self.settings.items() if name not in of_loader}

    def without(self, method: "type[Algorithm]") -> "Arm":
        """Return this arm without one of its algorithms."""
        return replace(self, algorithms=lambda: [each for each in self.algorithms() if not isinstance(each, method)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task: data, model and evaluation, and the quality to reach.

    Args:
        name: Of the task.
        setup: What all arms have in common. Runs with another one do not count, as those of an arm that has changed.
        train: Trains one arm with a learning rate and a seed, and returns its curve.
        target: The quality that a recipe of a race has to reach.
        quality: What the quality is called.
        percent: Whether it is a share, which the tables show in percent. Otherwise it is shown to three digits.
        is_better_higher: Whether more of it is better.
    """

    name: str
    setup: str
    train: Callable[[Arm, float, int], list[Point]]
    target: float
    quality: str
    percent: bool
    is_better_higher: bool

    def is_reached(self, quality: float, target: float) -> bool:
        """Return whether a quality is at least as good as another."""
        return quality >= target if self.is_better_higher else quality <= target

    def format(self, quality: float) -> str:
        """Return a quality as the tables show it."""
        return f"{quality:.1%}" if self.percent else f"{quality:.3f}"


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
            ValueError: If its import fails, or it does not define `TASK` and `RECIPE`, which needs a learning rate.
        """
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.exists():
            raise ValueError(f"{path} is not a Python file. Pass the file of a recipe.")
        for folder in (Path.cwd(), path.parent.resolve()):  # as for a script, so that a recipe may import its neighbors
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            frames = [
                each for each in extract_tb(error.__traceback__) if Path(each.filename).resolve() == path.resolve()
            ]
            line = f", line {frames[-1].lineno}" if frames else ""
            raise ValueError(f"{path}{line}: {type(error).__name__}: {error}") from error
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
        """Train once.

        Raises:
            ValueError: If the task returns an empty curve.
        """
        assert self.arm.lr is not None
        curve = self.task.train(self.arm, self.arm.lr, seed)
        if not curve:
            raise ValueError(
                f"{self.path}: train of task {self.task.name!r} must return one point or more, the last at the end of "
                f"training; got an empty curve for {self.arm.name!r} with seed {seed}."
            )
        return curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a race.

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
        """Return whether every seed reached the target, both bounds hold, and there are enough seeds."""
        is_reached = self.num_reached == len(self.qualities) >= MIN_SEEDS
        return is_reached and self.p < 1 - CONFIDENCE and self.ratio_bound < 1


def race(
    entry: Entry, reference: Entry, seeds: Sequence[int], write: Callable[[dict[str, Any]], object] = lambda log: None
) -> dict[str, Any]:
    """Train both with each seed, and return the log: recipes with their source, versions, seeds and curves.

    Args:
        entry: The recipe.
        reference: The record.
        seeds: The seeds.
        write: Called with the log after each seed.

    Raises:
        ValueError: If they have different tasks.
    """
    for name in ("name", "setup", "target", "is_better_higher"):
        mine, other = (getattr(each.task, name) for each in (entry, reference))
        if mine != other:
            raise ValueError(
                f"{entry.path.name} and {reference.path.name} must have the same task; the {name} of one is {mine!r}, "
                f"of the other {other!r}. Pass a record of the same task with --against."
            )
    import torch

    # CPU-seconds of several threads would count how long they wait for each other.
    torch.set_num_threads(1)
    curves: list[tuple[list[Point], list[Point]]] = []
    log: dict[str, Any] = {}
    for seed in seeds:
        turn = -1 if len(curves) % 2 else 1  # as the first one may find another machine, such as a cooler one
        of_reference, of_entry = [each.train(seed) for each in (reference, entry)[::turn]][::turn]
        curves.append((of_reference, of_entry))
        shown = [f"{seconds:.1f} s, {entry.task.format(quality)}" for (*_, (seconds, quality)) in curves[-1]]
        sys.stderr.write(f"seed {seed}: {reference.path.stem} {shown[0]}; {entry.path.stem} {shown[1]}\n")
        log = {
            "task": entry.task.name,
            "setup": entry.task.setup,
            "target": entry.task.target,
            "is_better_higher": entry.task.is_better_higher,
            "machine": describe_machine(),
            "versions": {
                name: version(name) for name in _VERSIONS if importlib.util.find_spec(name.replace("-suite", ""))
            },
            "seeds": list(seeds)[: len(curves)],
            "reference": _describe(reference, [pair[0] for pair in curves]),
            "recipe": _describe(entry, [pair[1] for pair in curves]),
        }
        write(log)
    return log


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
    """Return what a log shows.

    Raises:
        MissingConditionalImportError: If SciPy is not installed.
    """
    stats = _scipy_stats()
    ends = {who: [curve[-1] for curve in log[who]["curves"]] for who in ("reference", "recipe")}
    seconds, reference_seconds = ([second for second, _ in ends[who]] for who in ("recipe", "reference"))
    qualities, target = [quality for _, quality in ends["recipe"]], log["target"]
    ratios = [mine / theirs for mine, theirs in zip(seconds, reference_seconds, strict=True)]
    is_higher = log["is_better_higher"]
    # One seed has no variance to test with.
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


def describe_machine() -> str:
    """Name the processor and the versions that decide how long a step takes."""
    import torch

    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return f"{processor}, Python {platform.python_version()}, PyTorch {torch.__version__}, one thread"


def _scipy_stats() -> Any:
    try:
        from scipy import stats  # 0.5 s
    except ImportError as error:
        from composer_models import MissingConditionalImportError

        raise MissingConditionalImportError("race", "scipy") from error
    return stats


def newest_record(entry: Entry) -> Path:
    """Return the newest other recipe for a task in the folder of one: the file `TASK_NUMBER.py` of the largest number.

    Raises:
        ValueError: If the folder does not have one.
    """
    found = {path: path.stem.rpartition("_")[2] for path in entry.path.parent.glob(f"{entry.task.name}_[0-9]*.py")}
    files = {int(number): path for path, number in found.items() if number.isdecimal()}
    others = [number for number, path in files.items() if path.resolve() != entry.path.resolve()]
    if not others:
        raise ValueError(
            f"{entry.path.parent} must have a record, a file such as {entry.task.name}_0.py. Give one with --against."
        )
    return files[max(others)]


def _free_path(folder: Path, name: str) -> Path:
    """Return the path of a log that does not exist yet, not even unfinished."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    paths = (folder / f"{each}.json" for each in names)
    return next(path for path in paths if not (path.exists() or _unfinished(path).exists()))


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.unfinished")


def _write(path: Path, log: dict[str, Any]) -> None:
    path.write_text(json.dumps(log, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Race, write the log, print the result, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="composer race",
        description="Train a recipe to the target of its task, and compare its time with the record's.",
    )
    parser.add_argument("recipe", type=Path, help="a Python file with TASK and RECIPE")
    parser.add_argument("--seeds", type=int, default=MIN_SEEDS, help="number of runs of both (default: %(default)s)")
    parser.add_argument("--against", type=Path, help="the recipe of the record (default: TASK_NUMBER.py beside it)")
    parser.add_argument(
        "--log",
        type=Path,
        help="where to write the log (default: runs/race/RECIPE.json, or with a number if it exists)",
    )
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error("--seeds must be 1 or more.")
    try:
        _scipy_stats()  # before the models are trained
        entry = Entry.load(options.recipe)
        reference = Entry.load(options.against or newest_record(entry))
        path = options.log or _free_path(Path("runs", "race"), entry.path.stem)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Of the seeds so far, since a later one may fail; an existing log is replaced by a whole one only.
        unfinished = _unfinished(path)
        unfinished.touch()  # an error before the models are trained
        try:
            log = race(entry, reference, range(options.seeds), partial(_write, unfinished))
        finally:
            if unfinished.stat().st_size == 0:  # an error in the first seed
                unfinished.unlink()
        unfinished.replace(path)
    except (ValueError, ImportError, OSError) as error:
        sys.stderr.write(f"composer race: error: {error}\n")
        return 2
    result = evaluate(log)
    sys.stdout.write(
        f"{entry.arm.name}: {median(result.seconds):.2f} CPU-s to {entry.task.format(entry.task.target)}, "
        f"reached with {result.num_reached} of {len(result.qualities)} seeds (p = {result.p:.2g}).\n"
        f"{result.ratio:.3f} times {reference.path.stem} ({reference.arm.name}), below {result.ratio_bound:.3f} with "
        f"{CONFIDENCE:.0%} confidence: {'a record' if result.is_record else 'not a record'}. Log: {path}\n"
    )
    return 0
