"""Learning rate schedulers: the factor of the learning rate as a function of training time.

Every scheduler is a callable `scheduler(state, ssr=1.0) -> alpha`. It has no state, so it can be evaluated at any point
of training, and a resumed run needs nothing from a checkpoint. The optimizer's own learning rate times `alpha` is the
learning rate; with several schedulers their factors are multiplied.

Lengths are `Time` objects or time strings: batches (`'500ba'`), epochs (`'10ep'`), samples, tokens, iterations, or
fractions of the whole training (`'0.1dur'`). `ssr`, the scale schedule ratio, scales all of them except fractions,
which follow the duration and are scaled with it.

The constructors raise a `TypeError` for a factor (`alpha`, `gamma`, `t_mult`) that is not a number, and a `ValueError`
for one that is not finite, for a `gamma` below 0, and for an invalid length.
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from composer_optim.time_conversion import SchedulerState, convert_time, parse_length
from composer_time import Time

__all__ = [
    "ComposerScheduler",
    "StepScheduler",
    "MultiStepScheduler",
    "ConstantScheduler",
    "LinearScheduler",
    "ExponentialScheduler",
    "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestartsScheduler",
    "PolynomialScheduler",
]


class ComposerScheduler:
    """Base class of the schedulers, also for user-defined ones. Any callable with the same signature works too.

    Example:
        >>> class FirstEpochOnly(ComposerScheduler):
        ...     def __call__(self, state, ssr=1.0):
        ...         return 1.0 if state.timestamp < "1ep" else 0.0
    """

    def __call__(self, state: SchedulerState, ssr: float = 1.0) -> float:
        """Return the factor of the learning rate.

        Args:
            state: The training state.
            ssr: The scale schedule ratio.

        Raises:
            NotImplementedError: Always; a subclass must override it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define the learning rate factor: define __call__(self, state, "
            f"ssr=1.0) and return it."
        )


class StepScheduler(ComposerScheduler):
    """Multiply the learning rate by `gamma` after every `step_size`.

    `alpha = gamma ** floor(t / step_size)`

    Args:
        step_size: The length of each step.
        gamma: The factor of each step.

    Example:
        >>> scheduler = StepScheduler("30ep", gamma=0.1)
    """

    def __init__(self, step_size: str | Time, gamma: float = 0.1) -> None:
        self.step_size = parse_length(step_size, "step_size")
        self.gamma: float = as_finite("gamma", gamma, least=0)

    def __call__(self, state: SchedulerState, ssr: float = 1.0) -> float:
        """Return the factor at `state.timestamp`."""
        step_size = convert_period(self.step_size, "step_size", state, ssr)
        # Integers, since a rounded quotient could reach a step too early.
        return self.gamma ** (state.timestamp.get(step_size.unit).value // step_size.value)


class MultiStepScheduler(ComposerScheduler):
    """Multiply the learning rate by `gamma` at each milestone.

    `alpha = gamma ** (number of milestones that t has reached)`

    Args:
        milestones: The times, in any order and mixture of units.
        gamma: The factor at each milestone.

    Example:
        >>> scheduler = MultiStepScheduler(["0.3dur", "0.5dur", "0.9dur"], gamma=0.1)
    """

    def __init__(self, milestones: Sequence[str | Time], gamma: float = 0.1) -> None:
        # A string is a sequence too, and its letters would be read as milestones.
        if isinstance(milestones, str | Time):
            raise TypeError(
                f"milestones={milestones!r} is one length, not a sequence of them. Write [{str(milestones)!r}]."
            )
        self.milestones = [parse_length(milestone, "milestones", may_be_zero=True) for milestone in milestones]
        self.gamma: float = as_finite("gamma", gamma, least=0)

    def __call__(self, state: SchedulerState, ssr: float = 1.0) -> float:
        """Return the factor at `state.timestamp`."""
        milestones = [convert_time(milestone, state, ssr) for milestone in self.milestones]
        # Each milestone has its own unit, so they cannot be sorted and searched.
        return self.gamma ** sum(state.timestamp.get(each.unit).value >= each.value for each in milestones)


class ConstantScheduler(ComposerScheduler):
    """Multiply the learning rate by `alpha` until `t_max`, and by 1 afterwards.

    Args:
        alpha: The factor.
        t_max: The end of the factor.

    Example:
        >>> scheduler = ConstantScheduler(alpha=0.5, t_max="0.1dur")
    """

    def __init__(self, alpha: float = 1.0, t_max: str | Time = "1dur") -> None:
        self.alpha: float = as_finite("alpha", alpha)
        self.t_max = parse_length(t_max, "t_max")

    def __call__(self, state: SchedulerState, ssr: float = 1.0) -> float:
        """Return the factor at `state.timestamp`."""
        if self.alpha == 1.0:  # needs no length of training, so that may be unknown
            return 1.0
        t_max = convert_time(self.t_max, state, ssr)
        return self.alpha if state.timestamp.get(t_max.unit).value < t_max.value else 1.0


class LinearScheduler(ComposerScheduler):
    """Change the factor linearly from `alpha_i` to `alpha_f`, and keep it there.

    `alpha = alpha_i + min(1, t / t_max) * (alpha_f - alpha_i)`

    Args:
        alpha_i: The factor at the start.
        alpha_f: The factor from `t_max` on.
        t_max: The length of the change.

    Example:
        >>> scheduler = LinearScheduler(alpha_i=1.0, alpha_f=0.1, t_max="0.5dur")
    """

    def __init__(self, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: str | Time = "1dur") -> None:
        self.alpha_i: float = as_finite("alpha_i", alpha_i)
        self.alpha_f: float = as_finite("alpha_f", alpha_f)
        self.t_max = parse_length(t_max, "t_max")

    def __call__(self, state: SchedulerState, ssr: float = 1.0) -> float:
        """Return the factor at `state.timestamp`."""
        return linear(_done(self.t_max, state, ssr), self.alpha_i, self.alpha_f)


class ExponentialScheduler(ComposerScheduler):
    """Multiply the learning rate by `gamma` per `decay_period`, gradually at every step.

    `alpha = gamma ** (t / decay_period)`

    Args:
        gamma: The factor of a whole period.
        decay_period: The length of a period.

    Example:
        >>> scheduler = ExponentialScheduler(gamma=0.5, decay_period="10ep")
    """

    def __init__(self, gamma: float, decay_period: str | Time = "1ep") -> None:
        self.gamma: float = as_finite("gamma", gamma, least=0)
        self.decay_period = parse_length(decay_period, "decay_period")

    def __call__(self, state: SchedulerState, ssr: float = 1.0) -> float:
        """Return the factor at `state.timestamp`."""
        period = convert_period(self.decay_period, "decay_period", state, ssr)
        return self.gamma ** (state.timestamp.get(period.unit).value / period.value)


class CosineAnnealingScheduler(ComposerScheduler):
    """Change the factor from 1 to `alpha_f` along half a cosine period, and keep it there.

    `alpha = alpha_f + (1 - alpha_f) * (1 + cos(pi * min(1, t / t_max))) / 2`

    Args:
        t_max: The length of the change.
        alpha_f: The factor from `t_max` on.

    Example:
        >>> scheduler = CosineAnnealingScheduler(t_max="1dur", alpha_f=0.1)

    Reference:
        Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", ICLR 2017, arXiv:1608.03983,
        eq. (5), without restarts.
    """

    def __init__(self, t_max: str | Time = "1dur", alpha_f: float = 0.0) -> None:
        self.t_max = parse_length(t_max, "t_max")
        self.alpha_f: float = as_finite("alpha_f", alpha_f)

    def __call__(self, state: SchedulerState, ssr: float = 1.0) -> float:
        """Return the factor at `state.timestamp`."""
        return cosine(_done(self.t_max, state, ssr), self.alpha_f)


class CosineAnnealingWarmRestartsScheduler(ComposerScheduler):
    """Repeat cosine cycles from 1 to `alpha_f`, each `t_mult` times as long as the previous one.

    The first cycle lasts `t_0`; the lengths of others are rounded down. The end of a cycle belongs to the next one.

    Args:
        t_0: The length of the first cycle.
        t_mult: The factor between the lengths of successive cycles.
        alpha_f: The factor at the end of each cycle.

    Example:
        >>> scheduler = CosineAnnealingWarmRestartsScheduler(t_0="10ep", t_mult=2.0)

    Reference:
        Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", ICLR 2017, arXiv:1608.03983,
        eq. (5).
    """

    def __init__(self, t_0: str | Time, t_mult: float = 1.0, alpha_f: float = 0.0) -> None:
        self.t_0 = parse_length(t_0, "t_0")
        self.t_mult: float = as_finite("t_mult", t_mult)
        self.alpha_f: float = as_finite("alpha_f", alpha_f)

    def __call__(self, state: SchedulerState, ssr: float = 1.0) -> float:
        """Return the factor at `state.timestamp`.

        Raises:
            ValueError: If the current cycle has length 0.
        """
        t_0 = convert_period(self.t_0, "t_0", state, ssr)
        length = t_0.value
        in_cycle = state.timestamp.get(t_0.unit).value
        # A loop, because the lengths are rounded down at every cycle, so a formula would not match them.
        while in_cycle >= length:
            next_length = int(self.t_mult * length)
            if next_length <= 0:
                raise ValueError(
                    f"t_mult={self.t_mult!r} makes the cycle after one of {length}{t_0.unit.value} shorter than a "
                    f"whole unit. Use t_mult=1.0 or more, or a longer t_0 than {str(self.t_0)!r}."
                )
            if next_length == length:  # all that follow have this length too, and there may be millions
                in_cycle %= length
            else:
                in_cycle -= length
                length = next_length
        return cosine(fraction_done(in_cycle, 0, length), self.alpha_f)


class PolynomialScheduler(ComposerScheduler):
    """Change the factor from 1 to `alpha_f` as a power of the remaining time, and keep it there.

    `alpha = alpha_f + (1 - alpha_f) * (1 - min(1, t / t_max)) ** power`

    Args:
        power: The exponent, 0 or more.
        t_max: The length of the change.
        alpha_f: The factor from `t_max` on.

    Example:
        >>> scheduler = PolynomialScheduler(power=2.0, t_max="0.9dur")
    """

    def __init__(self, power: float, t_max: str | Time = "1dur", alpha_f: float = 0.0) -> None:
        self.power: float = as_finite("power", power, least=0)  # a negative one would divide by zero at the end
        self.t_max = parse_length(t_max, "t_max")
        self.alpha_f: float = as_finite("alpha_f", alpha_f)

    def __call__(self, state: SchedulerState, ssr: float = 1.0) -> float:
        """Return the factor at `state.timestamp`."""
        return polynomial(_done(self.t_max, state, ssr), self.power, self.alpha_f)


def _done(t_max: Time, state: SchedulerState, ssr: float) -> float:
    """Return the completed fraction of `t_max`."""
    end = convert_time(t_max, state, ssr)
    return fraction_done(state.timestamp.get(end.unit).value, 0, end.value)


def convert_period(period: Time, name: str, state: SchedulerState, ssr: float) -> Time:
    """Convert a length that is a divisor and therefore must not be 0."""
    converted = convert_time(period, state, ssr)
    if converted.value <= 0:
        raise ValueError(
            f"{name}={str(period)!r} comes to {str(converted)!r} in a training of {str(state.max_duration)!r} with a "
            f"scale schedule ratio of {ssr}. It needs at least one whole unit: make {name} longer."
        )
    return converted


def as_finite(name: str, value: Any, least: float = -math.inf) -> Any:
    """Return a number, unchanged, if it is finite, fits into a float and is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} is not a number. Give one, such as 0.1.")
    try:
        number = float(value)
    except OverflowError:
        number, value = math.inf, "a number larger than any float"  # Python may refuse to print its digits
    if not math.isfinite(number) or number < least:
        at_least = "" if least == -math.inf else f"{least:g} or more and "
        raise ValueError(f"{name}={value!r} must be {at_least}finite. Give a number such as 0.1.")
    return value


def check_flag(name: str, value: object) -> None:
    """Raise `TypeError` if a value is not a bool, such as the text 'False'."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is neither True nor False.")


def fraction_done(now: int, start: int, end: int) -> float:
    """Return the position of `now` between `start` and `end`, in [0, 1]; 1 if `end` is not after `start`."""
    # A length may be scaled or rounded down to 0, which must not divide by 0.
    if end <= start:
        return 1.0
    return min(1.0, max(0.0, (now - start) / (end - start)))


def linear(done: float, alpha_i: float, alpha_f: float) -> float:
    """Interpolate linearly from `alpha_i` to `alpha_f`."""
    return alpha_i + done * (alpha_f - alpha_i)


def cosine(done: float, alpha_f: float) -> float:
    """Interpolate from 1 to `alpha_f` along half a cosine period."""
    return alpha_f + (1.0 - alpha_f) * 0.5 * (1.0 + math.cos(math.pi * done))


def polynomial(done: float, power: float, alpha_f: float) -> float:
    """Interpolate from 1 to `alpha_f` by the `power`-th power of the remaining fraction."""
    return alpha_f + (1.0 - alpha_f) * (1.0 - done) ** power
