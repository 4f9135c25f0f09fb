"""What a comparison compares: arms, all of which are tuned with the same learning rates."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch.optim import Optimizer

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
        optimizer: Called with the model and `lr`, such as `partial(Muon, weight_decay=0.0)`. The task's own if `None`.
        settings: Options of the task's loader, such as `batch_size`, and of the Trainer, such as `precision`.
        like: Another arm, whose learning rate this one takes, such as the same training for another length of time.
        lr: The learning rate of a recipe that is not tuned any more.
    """

    name: str
    duration: str
    algorithms: Callable[[], list[Algorithm]] = list
    optimizer: Callable[..., Optimizer] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    like: str | None = None
    lr: float | None = None

    def describe(self) -> str:
        """Say what makes a run of this arm different from those of others."""
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

    def without(self, method: type[Algorithm]) -> "Arm":
        """Return this arm without one of its algorithms."""
        return replace(self, algorithms=lambda: [each for each in self.algorithms() if not isinstance(each, method)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What all arms of a comparison are trained for, and recipes race for.

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
