"""Schedulers that first raise the learning rate from 0 along a straight line.

All of them are `ramp * shape`: the ramp goes from 0 to 1 until `t_warmup` and stays there, and the shape begins to
move when the ramp ends. The scale schedule ratio leaves `t_warmup` alone, since how long a warm-up has to be depends
on the model rather than on the length of training. With `scale_warmup=True` it scales the ramp, but not the moment at
which the shape begins to move: after a shortened ramp the factor waits at its peak, a lengthened one is cut off.
"""

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence

from composer_optim.schedulers import (
    ComposerScheduler,
    MultiStepScheduler,
    check_flag,
    checked_factor,
    checked_power,
    cosine,
    fraction_done,
    linear,
    polynomial,
)
from composer_optim.time_conversion import SchedulerState, convert_time, parse_length, parse_time
from composer_time import Time, TimeUnit

__all__ = [
    "MultiStepWithWarmupScheduler",
    "ConstantWithWarmupScheduler",
    "LinearWithWarmupScheduler",
    "CosineAnnealingWithWarmupScheduler",
    "PolynomialWithWarmupScheduler",
]

# Named after the module's path in Composer, whose users tune `composer` loggers.
log = logging.getLogger("composer.optim.scheduler")


class MultiStepWithWarmupScheduler(ComposerScheduler):
    """Raise the factor from 0 to 1, then multiply it by `gamma` at each of the milestones.

    Args:
        t_warmup: How long the warm-up is.
        milestones: When, counted from the start of training, in any order and any mixture of units. One inside the
            warm-up takes effect at its end.
        gamma: The factor of each milestone.
        scale_warmup: Whether the scale schedule ratio scales the ramp.

    Example:
        >>> scheduler = MultiStepWithWarmupScheduler("500ba", milestones=["0.5dur", "0.9dur"])
    """

    def __init__(
        self, t_warmup: str | Time, milestones: Sequence[str | Time], gamma: float = 0.1, scale_warmup: bool = False
    ) -> None:
        self.t_warmup = parse_length(t_warmup, "t_warmup", may_be_zero=True)
        check_flag("scale_warmup", scale_warmup)
        self.scale_warmup = scale_warmup
        self._steps = MultiStepScheduler(milestones, gamma)

    @property
    def milestones(self) -> list[Time]:
        """When the factor is multiplied."""
        return self._steps.milestones

    @property
    def gamma(self) -> float:
        """The factor of each milestone."""
        return self._steps.gamma

    def __call__(self, state: SchedulerState, ssr: float = 1.0) -> float:
        """Return the factor at `state.timestamp`."""
        t_warmup = _convert_warmup(self.t_warmup, state)
        if state.timestamp.get(t_warmup.unit).value < t_warmup.value:
            return _ramp(self.t_warmup, state, ssr if self.scale_warmup else 1.0)
        return self._steps(state, ssr)


class _ShapeAfterWarmup(ComposerScheduler, ABC):
    """Hold what the schedulers below have in common: a ramp, and a shape that lasts until `t_max`."""

    def __init__(self, t_warmup: str | Time, t_max: str | Time, scale_warmup: bool) -> None:
        self.t_warmup = parse_length(t_warmup, "t_warmup", may_be_zero=True)
        self.t_max = parse_length(t_max, "t_max")
        check_flag("scale_warmup", scale_warmup)
        self.scale_warmup = scale_warmup

    def __call__(self, state: SchedulerState, ssr: float = 1.0) -> float:
        """Return the factor at `state.timestamp`.

        Raises:
            ValueError: If `t_warmup` and `t_max` have different units, or `t_max` ends before training does.
        """
        t_warmup = _convert_warmup(self.t_warmup, state)
        t_max = convert_time(self.t_max, state, ssr)
        raise_if_warmup_and_max_incompatible(t_warmup, t_max)
        raise_if_max_duration_exceeds_t_max(t_max, state, ssr)
        now = state.timestamp.get(t_warmup.unit).value
        if now < t_warmup.value:
            return _ramp(self.t_warmup, state, ssr if self.scale_warmup else 1.0) * self._shape(0.0)
        # A shape without any time to move in stays where the ramp ended.
        return self._shape(fraction_done(now, t_warmup.value, t_max.value) if t_max.value > t_warmup.value else 0.0)

    @abstractmethod
    def _shape(self, done: float) -> float:
        """Return the factor after `done`, in [0, 1], of the way from the end of the warm-up to `t_max`."""


class ConstantWithWarmupScheduler(_ShapeAfterWarmup):
    """Raise the factor from 0 to `alpha` and leave it there.

    Args:
        t_warmup: How long the warm-up is.
        alpha: The factor after it.
        t_max: Must not end before training does; has no other effect.
        scale_warmup: Whether the scale schedule ratio scales the ramp.

    Example:
        >>> scheduler = ConstantWithWarmupScheduler("0.05dur")
    """

    def __init__(
        self, t_warmup: str | Time, alpha: float = 1.0, t_max: str | Time = "1dur", scale_warmup: bool = False
    ) -> None:
        super().__init__(t_warmup, t_max, scale_warmup)
        self.alpha = checked_factor("alpha", alpha)

    def _shape(self, done: float) -> float:
        return self.alpha


class LinearWithWarmupScheduler(_ShapeAfterWarmup):
    """Raise the factor from 0 to `alpha_i`, then move it to `alpha_f` along a straight line until `t_max`.

    Args:
        t_warmup: How long the warm-up is.
        alpha_i: The factor at its end.
        alpha_f: The factor from `t_max` on.
        t_max: When the way ends, counted from the start of training.
        scale_warmup: Whether the scale schedule ratio scales the ramp.

    Example:
        >>> scheduler = LinearWithWarmupScheduler("500ba", alpha_f=0.1)
    """

    def __init__(
        self,
        t_warmup: str | Time,
        alpha_i: float = 1.0,
        alpha_f: float = 0.0,
        t_max: str | Time = "1dur",
        scale_warmup: bool = False,
    ) -> None:
        super().__init__(t_warmup, t_max, scale_warmup)
        self.alpha_i = checked_factor("alpha_i", alpha_i)
        self.alpha_f = checked_factor("alpha_f", alpha_f)

    def _shape(self, done: float) -> float:
        return linear(done, self.alpha_i, self.alpha_f)


class CosineAnnealingWithWarmupScheduler(_ShapeAfterWarmup):
    """Raise the factor from 0 to 1, then move it to `alpha_f` along half a period of the cosine until `t_max`.

    Args:
        t_warmup: How long the warm-up is.
        t_max: When the way ends, counted from the start of training.
        alpha_f: The factor from `t_max` on.
        scale_warmup: Whether the scale schedule ratio scales the ramp.

    Example:
        >>> scheduler = CosineAnnealingWithWarmupScheduler("0.06dur", alpha_f=0.1)
    """

    def __init__(
        self, t_warmup: str | Time, t_max: str | Time = "1dur", alpha_f: float = 0.0, scale_warmup: bool = False
    ) -> None:
        super().__init__(t_warmup, t_max, scale_warmup)
        self.alpha_f = checked_factor("alpha_f", alpha_f)

    def _shape(self, done: float) -> float:
        return cosine(done, self.alpha_f)


class PolynomialWithWarmupScheduler(_ShapeAfterWarmup):
    """Raise the factor from 0 to 1, then move it to `alpha_f` as a power of what is left of the way to `t_max`.

    Args:
        t_warmup: How long the warm-up is.
        power: The exponent, 0 or more.
        t_max: When the way ends, counted from the start of training.
        alpha_f: The factor from `t_max` on.
        scale_warmup: Whether the scale schedule ratio scales the ramp.

    Example:
        >>> scheduler = PolynomialWithWarmupScheduler("1ep", power=2.0)
    """

    def __init__(
        self,
        t_warmup: str | Time,
        power: float = 2.0,
        t_max: str | Time = "1dur",
        alpha_f: float = 0.0,
        scale_warmup: bool = False,
    ) -> None:
        super().__init__(t_warmup, t_max, scale_warmup)
        self.power = checked_power(power)
        self.alpha_f = checked_factor("alpha_f", alpha_f)

    def _shape(self, done: float) -> float:
        return polynomial(done, self.power, self.alpha_f)


def _convert_warmup(t_warmup: Time, state: SchedulerState) -> Time:
    """Convert the moment at which the warm-up ends, and warn if there is no warm-up at all."""
    converted = convert_time(t_warmup, state)
    if converted.value == 0:
        warnings.warn(
            f"t_warmup={str(t_warmup)!r} comes to {str(converted)!r} in a training of {str(state.max_duration)!r}, so "
            f"there is no warm-up. Make it longer, or use the scheduler of the same name without a warm-up.",
            UserWarning,
            stacklevel=3,
        )
    return converted


def _ramp(t_warmup: Time, state: SchedulerState, ssr: float) -> float:
    """Return the factor of the warm-up, in [0, 1]."""
    end = convert_time(t_warmup, state, ssr)
    return fraction_done(state.timestamp.get(end.unit).value, 0, end.value)


def raise_if_warmup_and_max_incompatible(t_warmup: Time, t_max: Time) -> None:
    """Raise `ValueError` if the converted lengths of a warm-up and of a schedule have different units."""
    if t_warmup.unit != t_max.unit:
        raise ValueError(
            f"Cannot use warmup scheduler: t_warmup comes to {str(t_warmup)!r} and t_max to {str(t_max)!r}, which are "
            f"different units. Give both in the same unit, or both as fractions of the duration such as '0.1dur'."
        )


def raise_if_max_duration_exceeds_t_max(t_max: "str | Time", state: SchedulerState, ssr: float = 1.0) -> None:
    """Raise `ValueError` if training lasts longer than `t_max`, in converted units."""
    t_max = parse_time(t_max, "t_max")
    max_duration = _comparable_max_duration(t_max, state)
    if max_duration is None:
        log.debug("t_max=%s cannot be compared with max_duration=%s", t_max, state.max_duration)
        return
    # `int(epochs * batches * ssr)` can fall one short of `int(epochs * ssr) * batches`.
    rounding = 0 if ssr == 1.0 else 1
    if t_max.value + rounding < max_duration:
        raise ValueError(
            f"t_max={str(t_max)!r} must be greater than or equal to max_duration {str(state.max_duration)!r}, which "
            f"comes to {max_duration}{t_max.unit.value}, with a scale schedule ratio of {ssr}. Raise t_max, or leave "
            f"it at '1dur'."
        )


def _comparable_max_duration(t_max: Time, state: SchedulerState) -> int | None:
    """Return `max_duration` in the unit of `t_max`, or `None` where it is not known."""
    max_duration = state.max_duration
    assert max_duration is not None, "convert_time has checked it"
    if max_duration.unit == t_max.unit:
        return int(max_duration)
    if max_duration.unit == TimeUnit.EPOCH and t_max.unit == TimeUnit.BATCH and state.dataloader_len is not None:
        return int(max_duration) * int(state.dataloader_len)
    return None
