"""Schedulers with a linear warm-up from 0.

All of them are `ramp * shape`: the ramp rises from 0 to 1 until `t_warmup` and stays there, and the shape starts to
change when the ramp ends. The scale schedule ratio does not affect `t_warmup`, because the necessary warm-up depends on
the model rather than on the length of training. With `scale_warmup=True` it scales the ramp, but not the time at which
the shape starts to change: after a shortened ramp the factor stays at its peak, a lengthened one is cut off.
"""

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence

from composer_optim.schedulers import (
    ComposerScheduler,
    MultiStepScheduler,
    as_finite,
    check_flag,
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
    """Increase the factor from 0 to 1, then multiply it by `gamma` at each milestone.

    Args:
        t_warmup: The length of the warm-up.
        milestones: Times from the start of training, in any order and mixture of units. One inside the warm-up takes
            effect at its end.
        gamma: The factor at each milestone.
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
        """The times at which the factor is multiplied."""
        return self._steps.milestones

    @property
    def gamma(self) -> float:
        """The factor at each milestone."""
        return self._steps.gamma

    def __call__(self, state: SchedulerState, ssr: float = 1.0) -> float:
        """Return the factor at `state.timestamp`."""
        t_warmup = _convert_warmup(self.t_warmup, state)
        if state.timestamp.get(t_warmup.unit).value < t_warmup.value:
            return _ramp(self.t_warmup, state, ssr if self.scale_warmup else 1.0)
        return self._steps(state, ssr)


class ShapeAfterWarmup(ComposerScheduler, ABC):
    """Base of the schedulers below: a ramp, and a shape that lasts until `t_max`."""

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
        # Checked in every call, because the lengths are known only with a state.
        t_max = convert_time(self.t_max, state, ssr)
        raise_if_warmup_and_max_incompatible(t_warmup, t_max)
        raise_if_max_duration_exceeds_t_max(t_max, state, ssr)
        now = state.timestamp.get(t_warmup.unit).value
        if now < t_warmup.value:
            # Ends at the first value of the shape, so that the factor has no jump there.
            return _ramp(self.t_warmup, state, ssr if self.scale_warmup else 1.0) * self._shape(0.0)
        # A shape of length 0 stays at its start value.
        return self._shape(fraction_done(now, t_warmup.value, t_max.value) if t_max.value > t_warmup.value else 0.0)

    @abstractmethod
    def _shape(self, done: float) -> float:
        """Return the factor at the fraction `done`, in [0, 1], between the end of the warm-up and `t_max`."""


class ConstantWithWarmupScheduler(ShapeAfterWarmup):
    """Increase the factor from 0 to `alpha` and keep it there.

    Args:
        t_warmup: The length of the warm-up.
        alpha: The factor after the warm-up.
        t_max: Must not end before training does; has no other effect.
        scale_warmup: Whether the scale schedule ratio scales the ramp.

    Example:
        >>> scheduler = ConstantWithWarmupScheduler("0.05dur")
    """

    def __init__(
        self, t_warmup: str | Time, alpha: float = 1.0, t_max: str | Time = "1dur", scale_warmup: bool = False
    ) -> None:
        super().__init__(t_warmup, t_max, scale_warmup)
        self.alpha: float = as_finite("alpha", alpha)

    def _shape(self, done: float) -> float:
        return self.alpha


class LinearWithWarmupScheduler(ShapeAfterWarmup):
    """Increase the factor from 0 to `alpha_i`, then change it linearly to `alpha_f` until `t_max`.

    Args:
        t_warmup: The length of the warm-up.
        alpha_i: The factor at the end of the warm-up.
        alpha_f: The factor from `t_max` on.
        t_max: The end of the change, from the start of training.
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
        self.alpha_i: float = as_finite("alpha_i", alpha_i)
        self.alpha_f: float = as_finite("alpha_f", alpha_f)

    def _shape(self, done: float) -> float:
        return linear(done, self.alpha_i, self.alpha_f)


class CosineAnnealingWithWarmupScheduler(ShapeAfterWarmup):
    """Increase the factor from 0 to 1, then change it to `alpha_f` along half a cosine period until `t_max`.

    Args:
        t_warmup: The length of the warm-up.
        t_max: The end of the change, from the start of training.
        alpha_f: The factor from `t_max` on.
        scale_warmup: Whether the scale schedule ratio scales the ramp.

    Example:
        >>> scheduler = CosineAnnealingWithWarmupScheduler("0.06dur", alpha_f=0.1)
    """

    def __init__(
        self, t_warmup: str | Time, t_max: str | Time = "1dur", alpha_f: float = 0.0, scale_warmup: bool = False
    ) -> None:
        super().__init__(t_warmup, t_max, scale_warmup)
        self.alpha_f: float = as_finite("alpha_f", alpha_f)

    def _shape(self, done: float) -> float:
        return cosine(done, self.alpha_f)


class PolynomialWithWarmupScheduler(ShapeAfterWarmup):
    """Increase the factor from 0 to 1, then change it to `alpha_f` as a power of the remaining time to `t_max`.

    Args:
        t_warmup: The length of the warm-up.
        power: The exponent, 0 or more.
        t_max: The end of the change, from the start of training.
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
        self.power: float = as_finite("power", power, least=0)
        self.alpha_f: float = as_finite("alpha_f", alpha_f)

    def _shape(self, done: float) -> float:
        return polynomial(done, self.power, self.alpha_f)


def _convert_warmup(t_warmup: Time, state: SchedulerState) -> Time:
    """Convert the end of the warm-up, and warn if its length is 0."""
    converted = convert_time(t_warmup, state)
    if converted.value == 0:
        warnings.warn(
            f"t_warmup={str(t_warmup)!r} comes to {str(converted)!r} in a training of {str(state.max_duration)!r}, so "
            f"the warm-up is skipped. Make it longer, or use the scheduler of the same name without a warm-up.",
            UserWarning,
            stacklevel=3,  # the caller of the scheduler
        )
    return converted


def warn_if_warmup_exceeds_training(scheduler: object, state: SchedulerState, ssr: float = 1.0) -> None:
    """Warn if training ends before the warm-up of a scheduler, as far as their units can be compared."""
    t_warmup, duration = getattr(scheduler, "t_warmup", None), state.max_duration
    is_unsized = state.dataloader_len is None
    if not isinstance(t_warmup, Time) or duration is None or (duration.unit == TimeUnit.EPOCH and is_unsized):
        return
    scaled = ssr if getattr(scheduler, "scale_warmup", False) else 1.0
    end, length = convert_time(t_warmup, state, scaled), convert_time(Time(1.0, TimeUnit.DURATION), state)
    if end.unit == length.unit and end.value > length.value:
        warnings.warn(
            f"t_warmup={str(t_warmup)!r} is longer than training, max_duration={str(duration)!r} ({length}), so the "
            f"learning rate never reaches its peak. Shorten the warm-up, or train longer.",
            UserWarning,
            stacklevel=4,  # the caller of compile_composer_scheduler(s)
        )


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
    t_max, duration = parse_time(t_max, "t_max"), state.max_duration
    assert duration is not None, "convert_time has checked it"
    if duration.unit == t_max.unit:
        max_duration = int(duration)
    elif duration.unit == TimeUnit.EPOCH and t_max.unit == TimeUnit.BATCH and state.dataloader_len is not None:
        max_duration = int(duration) * int(state.dataloader_len)
    else:
        log.debug("t_max=%s cannot be compared with max_duration=%s", t_max, duration)
        return
    # Tolerance: `int(epochs * batches * ssr)` can be one less than `int(epochs * ssr) * batches`.
    rounding = 0 if ssr == 1.0 else 1
    if t_max.value + rounding < max_duration:
        raise ValueError(
            f"t_max={str(t_max)!r} must be greater than or equal to max_duration {str(duration)!r}, which "
            f"comes to {max_duration}{t_max.unit.value}, with a scale schedule ratio of {ssr}. Raise t_max, or leave "
            f"it at '1dur'."
        )
