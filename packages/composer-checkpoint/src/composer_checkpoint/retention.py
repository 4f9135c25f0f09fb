"""Which checkpoints are kept, and which may be deleted."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from composer_events.arguments import to_time
from composer_events.metric_entries import higher_is_better
from composer_time import Time, Timestamp, TimeUnit

__all__ = ["RetentionPolicy", "SavedCheckpoint", "choose_to_delete"]

_RULES = ("last", "every", "best")
_EXAMPLE = "{'last': 3, 'every': '10ep', 'best': ('metrics/eval/MulticlassAccuracy', 'max', 2)}"


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that was committed: its name, when in training, and what was measured by then."""

    name: str
    timestamp: Timestamp
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Which checkpoints are kept: those that any of the rules keeps. Without a rule, all.

    Args:
        last: How many of the newest to keep. 0, without other rules, keeps none at all: for folders that are copied
            elsewhere. Otherwise the newest is kept whatever the rules are.
        every: Keeps the first one at or after each multiple of this length of training.
        metric: Keeps the best by this metric, and those of which it is not known until enough are.
        mode: Whether a larger (`'max'`) or a smaller (`'min'`) value is better. `None` goes by the metric itself, or
            else by its name.
        num_best: How many of the best to keep.

    Raises:
        ValueError: If a number is negative, a length is not positive or has no counter, or `mode` is something else.
            Where `mode` is `None`, and neither metric nor name says which values are better, when that is needed.

    Example:
        >>> RetentionPolicy.from_setting({"last": 2, "every": "10ep"})
        RetentionPolicy(last=2, every=Time(10, TimeUnit.EPOCH), metric=None, mode=None, num_best=0)
    """

    last: int | None = None
    every: Time[Any] | None = None
    metric: str | None = None
    mode: Literal["max", "min"] | None = None
    num_best: int = 0

    def __post_init__(self) -> None:
        for name, count in (("last", self.last), ("num_best", self.num_best)):
            if count is not None and (type(count) is not int or count < 0):
                raise ValueError(f"{name}={count!r} is no number of checkpoints: it must be a whole number from 0.")
        if self.mode not in ("max", "min", None):
            raise ValueError(f"mode={self.mode!r} must be 'max' or 'min', whichever values are better, or None.")
        if self.every is not None and (self.every.value <= 0 or self.every.unit is TimeUnit.DURATION):
            raise ValueError(
                f"every={str(self.every)!r} is no interval between checkpoints to keep: it needs a positive number and "
                f"a unit that counts, such as '10ep' or '500ba'."
            )

    @classmethod
    def from_setting(cls, setting: "int | Mapping[str, Any] | RetentionPolicy | None") -> "RetentionPolicy":
        """Read what a user typed.

        Args:
            setting: -1 or `None` for all, a number for that many of the newest, or a mapping with some of the keys
                `last` (a number), `every` (a time string) and `best` (metric, `'max'`, `'min'` or `None`, how many).

        Raises:
            ValueError: If it is none of these.
            TypeError: If `every` is no length of training.
        """
        if isinstance(setting, RetentionPolicy):
            return setting
        if setting is None or setting == -1:
            return cls()
        if isinstance(setting, int):
            return cls(last=setting)
        if not isinstance(setting, Mapping) or not set(setting) <= set(_RULES):
            raise ValueError(
                f"{setting!r} does not say which checkpoints to keep: give a number, -1 for all, or a mapping with "
                f"some of the keys {', '.join(_RULES)}, such as {_EXAMPLE}."
            )
        metric, mode, num_best = _best(setting.get("best"))
        every = setting.get("every")
        return cls(setting.get("last"), None if every is None else to_time("every", every), metric, mode, num_best)

    def with_mode(self, metric: object = None) -> "RetentionPolicy":
        """Return the policy with a mode where it needs one, by its metric or else by the metric's name.

        Raises:
            ValueError: If neither says which values are better.
        """
        if self.metric is None or self.mode is not None:
            return self
        is_higher = higher_is_better(self.metric, metric)
        if is_higher is None:
            raise ValueError(
                f"best: neither the metric {self.metric!r} nor its name says whether larger or smaller values are "
                f"better. Say 'max' or 'min', as in ({self.metric!r}, 'max', {self.num_best}), or give the metric an "
                f"attribute higher_is_better."
            )
        return replace(self, mode="max" if is_higher else "min")

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever deleted."""
        return self.last is None and self.every is None and self.metric is None


def choose_to_delete(
    history: Sequence[SavedCheckpoint], policy: RetentionPolicy, *, latest: str | None = None
) -> list[str]:
    """Return the names of the checkpoints that the policy does not keep, oldest first.

    The decision depends only on the arguments. Applied again after the deletion it deletes nothing more.

    Args:
        history: What exists, in the order in which it was committed.
        policy: The rules.
        latest: What the pointer points to, which is never deleted.

    Example:
        >>> history = [SavedCheckpoint(f"ep{epoch}", Timestamp(epoch=epoch)) for epoch in range(1, 8)]
        >>> choose_to_delete(history, RetentionPolicy.from_setting({"last": 2, "every": "3ep"}))
        ['ep1', 'ep2', 'ep4', 'ep5']
    """
    if policy.keeps_all:
        return []
    keep = {latest} | {saved.name for saved in history[len(history) - min(policy.last or 0, len(history)) :]}
    if policy.every is not None:
        keep |= _first_of_each(history, policy.every)
    if policy.metric is not None:
        keep |= _best_by(history, policy.metric, policy.with_mode().mode, policy.num_best)
    if policy != RetentionPolicy(last=0):
        keep |= {saved.name for saved in history[-1:]}
    return [saved.name for saved in history if saved.name not in keep]


def _first_of_each(history: Sequence[SavedCheckpoint], every: Time[Any]) -> set[str]:
    """Keep the first of each interval: it stays the first when others of the interval go."""
    first: dict[int, str] = {}
    for saved in history:
        interval = int(saved.timestamp.get(every.unit).value // every.value)
        if interval > 0:
            first.setdefault(interval, saved.name)
    return set(first.values())


def _best_by(history: Sequence[SavedCheckpoint], metric: str, mode: str | None, num_best: int) -> set[str]:
    """Keep the best; of equals the oldest, so that none is deleted in favour of one that is no better.

    While fewer are measured than are to be kept, none is given up that was not.
    """
    sign = -1 if mode == "max" else 1
    measured = [(saved, saved.metrics[metric]) for saved in history if metric in saved.metrics]
    ranked = sorted((pair for pair in measured if not math.isnan(pair[1])), key=lambda pair: sign * pair[1])
    unmeasured = {saved.name for saved in history if metric not in saved.metrics}
    return {saved.name for saved, _ in ranked[:num_best]} | (unmeasured if len(ranked) < num_best else set())


def _best(setting: Any) -> tuple[str | None, Literal["max", "min"] | None, int]:
    if setting is None:
        return None, None, 0
    match setting:
        case (str(metric), str() | None as mode, int(num_best)) if num_best != 0:
            return metric, cast(Literal["max", "min"] | None, mode), num_best
    raise ValueError(
        f"best={setting!r} does not say which checkpoints are best: give the metric, 'max', 'min' or None, and how "
        f"many, such as ('metrics/eval/MulticlassAccuracy', 'max', 2)."
    )
