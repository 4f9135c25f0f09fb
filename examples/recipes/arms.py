"""What a comparison compares: arms, all of which are tuned with the same learning rates."""

from collections import Counter
from dataclasses import dataclass

from composer.cli.race import Arm as Arm
from composer.cli.race import Point as Point
from composer.cli.race import Task as Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A recipe, what it is made of, and what it has to beat.

    Args:
        name: Of the comparison.
        task: What they are trained for.
        arms: In the order of the table.
        baseline: The arm whose final quality is the target.
        composed: The arm that is meant to get there in half the time.
        learning_rates: What every arm is tuned with, once each.

    Raises:
        ValueError: If the comparison would not be a fair one: an arm is missing or named twice, or an arm trains for
            another length of time and the baseline has none that does.
    """

    name: str
    task: Task
    arms: tuple[Arm, ...]
    baseline: str
    composed: str
    learning_rates: tuple[float, ...]

    def __post_init__(self) -> None:
        names = Counter(arm.name for arm in self.arms)
        if twice := [name for name, number in names.items() if number > 1]:
            raise ValueError(f"{self.name}: arms {twice} are there more than once; runs are told apart by the name.")
        for name in (self.baseline, self.composed, *(arm.like for arm in self.arms if arm.like)):
            if name not in names:
                raise ValueError(f"{self.name}: there is no arm {name!r}; there are {list(names)}.")
        for arm in self.arms:
            if arm.like is not None and self.arm(arm.like).like is not None:
                raise ValueError(f"{self.name}: {arm.name!r} is like {arm.like!r}, which is not tuned itself.")
        lengths = {name: sum(arm.like == name for arm in self.arms) for name in (self.baseline, self.composed)}
        if lengths[self.composed] > lengths[self.baseline]:
            raise ValueError(
                f"{self.name}: {self.composed!r} trains for {lengths[self.composed]} other lengths of time and "
                f"{self.baseline!r} for {lengths[self.baseline]}. Give the baseline the same: it may lose nothing by "
                f"a shorter training."
            )

    def arm(self, name: str) -> Arm:
        """Return the arm of a name."""
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def tuned(self) -> list[Arm]:
        """The arms that have a learning rate of their own."""
        return [arm for arm in self.arms if arm.like is None]
