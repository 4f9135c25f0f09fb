"""What a comparison compares: arms, all of which are tuned with the same learning rates."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from composer import Algorithm

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
        settings: What else this arm does in another way, as the recipe's own functions understand it.
        like: Another arm, whose learning rate this one takes: the same training for another length of time.
    """

    name: str
    duration: str
    algorithms: Callable[[], list[Algorithm]] = list
    settings: Mapping[str, Any] = field(default_factory=dict)
    like: str | None = None

    def describe(self) -> str:
        """Say what makes a run of this arm different from those of others."""
        algorithms = ", ".join(map(repr, self.algorithms())) or "no algorithms"
        settings = "".join(f", {name}={value!r}" for name, value in sorted(self.settings.items()))
        return f"{self.duration}, {algorithms}{settings}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A recipe, what it is made of, and what it has to beat.

    Args:
        name: Of the recipe.
        setup: What all arms have in common. Runs with another one do not count, as those of an arm that has changed.
        arms: In the order of the table.
        baseline: The arm whose final quality is the target.
        composed: The arm that is meant to get there in half the time.
        learning_rates: What every arm is tuned with, once each.
        train: Trains one arm with a learning rate and a seed, and returns its curve.
        quality: What the quality is called.
        percent: Whether it is a share, which the tables show in percent. Otherwise it is shown to three digits.
        is_better_higher: Whether more of it is better.

    Raises:
        ValueError: If the comparison would not be a fair one: an arm is missing or named twice, or an arm trains for
            another length of time and the baseline has none that does.
    """

    name: str
    setup: str
    arms: tuple[Arm, ...]
    baseline: str
    composed: str
    learning_rates: tuple[float, ...]
    train: Callable[[Arm, float, int], list[Point]]
    quality: str
    percent: bool
    is_better_higher: bool

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

    def is_reached(self, quality: float, target: float) -> bool:
        """Answer whether a quality is at least as good as another."""
        return quality >= target if self.is_better_higher else quality <= target
