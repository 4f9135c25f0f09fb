"""Runs that are done, one line of JSON each, so that a comparison can be made in several sittings."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arms import Arm, Comparison, Point

from composer.cli.race import describe_machine

# The learning rate is chosen with a seed that the comparison itself does not use.
TUNING_SEED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training, done.

    Args:
        comparison: The name of the recipe.
        arm: The name of the arm.
        description: What the arm and the setup were then.
        lr: The learning rate.
        seed: Of weights and batches.
        curve: CPU-seconds and quality at each evaluation; the last one is that of the end.
        machine: What it ran on.
    """

    comparison: str
    arm: str
    description: str
    lr: float
    seed: int
    curve: list[Point]
    machine: str

    @property
    def seconds(self) -> float:
        """CPU-seconds of the whole training."""
        return self.curve[-1][0]

    @property
    def quality(self) -> float:
        """Quality at the end."""
        return self.curve[-1][1]


class Records:
    """The runs of one comparison in a file, to which new ones are added as they are done.

    Runs of arms that have changed since are left in the file, and not seen.

    Args:
        path: Made with the first run.
        comparison: Which runs count.

    Raises:
        ValueError: If the file has a line that is no run, or its runs were made on different machines.
    """

    def __init__(self, path: Path, comparison: Comparison) -> None:
        self.path = path
        self._comparison = comparison
        self._descriptions = {arm.name: f"{comparison.task.setup}; {arm.describe()}" for arm in comparison.arms}
        lines = path.read_text().splitlines() if path.exists() else []
        runs = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
        self.runs = [run for run in runs if self._counts(run)]
        if len(machines := {run.machine for run in self.runs}) > 1:
            raise ValueError(
                f"{path} has runs of {len(machines)} machines, whose CPU-seconds cannot be compared: "
                f"{'; '.join(sorted(machines))}. Keep those of one."
            )

    def find(self, arm: Arm, lr: float, seed: int) -> Run | None:
        """Return a run, if it is done."""
        return next((run for run in self.runs if (run.arm, run.lr, run.seed) == (arm.name, lr, seed)), None)

    def of(self, arm: Arm, lr: float) -> list[Run]:
        """Return the runs of an arm with a learning rate, those of tuning left out, by their seeds."""
        runs = [run for run in self.runs if (run.arm, run.lr) == (arm.name, lr) and run.seed != TUNING_SEED]
        return sorted(runs, key=lambda run: run.seed)

    def add(self, arm: Arm, lr: float, seed: int, curve: list[Point]) -> Run:
        """Keep a run.

        Raises:
            ValueError: If there are runs of another machine.
        """
        run = Run(
            comparison=self._comparison.name,
            arm=arm.name,
            description=self._descriptions[arm.name],
            lr=lr,
            seed=seed,
            curve=curve,
            machine=describe_machine(),
        )
        self.check_machine()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(run)) + "\n")
        self.runs.append(run)
        return run

    def check_machine(self) -> None:
        """Check that runs made here may stand beside those that there are.

        Raises:
            ValueError: If those were made on another machine.
        """
        here = describe_machine()
        if self.runs and self.runs[0].machine != here:
            raise ValueError(
                f"{self.path} has runs of another machine ({self.runs[0].machine}), and CPU-seconds of this one "
                f"({here}) cannot be compared with theirs: name another file with --records."
            )

    def best_lr(self, arm: Arm) -> float | None:
        """Return the learning rate that an arm was best with when it was tuned; `None` until all have been tried.

        Rates that were tried besides those of the comparison count as well.
        """
        arm = arm if arm.like is None else self._comparison.arm(arm.like)
        done = [run for run in self.runs if (run.arm, run.seed) == (arm.name, TUNING_SEED)]
        if not {run.lr for run in done}.issuperset(self._comparison.learning_rates):
            return None
        choose = max if self._comparison.task.is_better_higher else min
        return choose(done, key=lambda run: run.quality).lr

    def _counts(self, run: Run) -> bool:
        return run.comparison == self._comparison.name and self._descriptions.get(run.arm) == run.description


def _parse(line: str, place: str) -> Run:
    try:
        fields: dict[str, Any] = json.loads(line)
        run = Run(**fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place} is no run of a comparison: {line[:60]!r}. Remove the line.") from error
    return Run(**{**fields, "curve": [(seconds, quality) for seconds, quality in run.curve]})
