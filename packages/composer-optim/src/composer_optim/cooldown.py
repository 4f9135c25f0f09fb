"""Schedulers that decay at the end of training, after a plateau or a slow fall whose length need not be planned.

The decay is counted back from the end of training: `fit(duration=...)`, or a resumed run with a longer `max_duration`,
starts it later and does not change what comes before it.
"""

import math
from collections.abc import Callable
from typing import Literal

from composer_optim.schedulers import as_finite, convert_period, cosine, fraction_done, linear
from composer_optim.time_conversion import SchedulerState, convert_time, parse_length
from composer_optim.warmup import ShapeAfterWarmup
from composer_time import Time, TimeUnit

__all__ = ["InversePowerWithWarmupScheduler", "WarmupStableDecayScheduler"]

Decay = Literal["linear", "cosine", "1-sqrt", "exponential"]

_DECAYS: dict[str, Callable[[float, float], float]] = {
    "linear": lambda done, alpha_f: linear(done, 1.0, alpha_f),
    "cosine": cosine,
    "1-sqrt": lambda done, alpha_f: linear(math.sqrt(done), 1.0, alpha_f),
    "exponential": lambda done, alpha_f: alpha_f**done,
}


class WarmupStableDecayScheduler(ShapeAfterWarmup):
    """Increase the factor from 0 to 1, keep it there, and decay it to `alpha_f` at the end of training.

    With `x` the completed fraction of the last `t_decay`, the decay is

    - `'linear'`: `1 - (1 - alpha_f) * x`, which makes the schedule a trapezoid
    - `'cosine'`: `alpha_f + (1 - alpha_f) * (1 + cos(pi * x)) / 2`
    - `'1-sqrt'`: `1 - (1 - alpha_f) * sqrt(x)`
    - `'exponential'`: `alpha_f ** x`

    If training is too short for both the warm-up and the decay, the two are multiplied.

    Args:
        t_warmup: The length of the warm-up.
        t_decay: The length of the decay, which ends at `t_max`. 0 for none.
        decay: The shape of the decay.
        alpha_f: The factor from `t_max` on; more than 0 with `decay='exponential'`.
        t_max: The end of the decay, from the start of training.
        scale_warmup: Whether the scale schedule ratio scales the ramp.

    Example:
        >>> scheduler = WarmupStableDecayScheduler("500ba", t_decay="0.2dur", decay="linear")

    Reference:
        Hu et al., "MiniCPM: Unveiling the Potential of Small Language Models with Scalable Training Strategies", 2024,
        arXiv:2404.06395, eq. (1). Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training
        Durations", NeurIPS 2024, arXiv:2405.18392, for the shapes of the decay.
    """

    def __init__(
        self,
        t_warmup: str | Time,
        t_decay: str | Time = "0.1dur",
        decay: Decay = "1-sqrt",
        alpha_f: float = 0.0,
        t_max: str | Time = "1dur",
        scale_warmup: bool = False,
    ) -> None:
        super().__init__(t_warmup, t_max, scale_warmup)
        self.t_decay = parse_length(t_decay, "t_decay", may_be_zero=True)
        if decay not in _DECAYS:
            raise ValueError(f"decay={decay!r} must be one of {', '.join(map(repr, _DECAYS))}.")
        self.decay: Decay = decay
        self.alpha_f: float = as_finite("alpha_f", alpha_f)
        if decay == "exponential" and alpha_f <= 0:
            raise ValueError(
                f"alpha_f={alpha_f!r} must be more than 0 with decay='exponential', which never reaches 0. Use 0.1, or "
                f"another decay."
            )

    def __call__(self, state: SchedulerState, ssr: float = 1.0) -> float:
        """Return the factor at `state.timestamp`.

        Raises:
            ValueError: If `t_warmup`, `t_decay` and `t_max` have different units, or `t_max` ends before training does.
        """
        alpha = super().__call__(state, ssr)
        end, length = convert_time(self.t_max, state, ssr), convert_time(self.t_decay, state, ssr)
        now, start = state.timestamp.get(end.unit).value, end.value - length.value
        alpha *= self._before_decay(Time(max(0, min(now, start)), end.unit), state, ssr)
        if length.value == 0:
            return alpha
        _check_units("t_decay", length, end.unit)
        return alpha * _DECAYS[self.decay](fraction_done(now, start, end.value), self.alpha_f)

    def _shape(self, done: float) -> float:
        return 1.0

    def _before_decay(self, time: Time, state: SchedulerState, ssr: float) -> float:
        """Return the factor at a time before the decay, apart from the warm-up."""
        return 1.0


class InversePowerWithWarmupScheduler(WarmupStableDecayScheduler):
    """Increase the factor from 0 to 1, then let it fall as a power of the time, and decay it at the end of training.

    `alpha = max(1, t / t_flat) ** -power`, times the warm-up and the decay of `WarmupStableDecayScheduler`. A power of
    0.5 is the inverse square root schedule. With `power=0.51` and `decay='exponential'` it is the Power scheduler
    `min(lr, a * batch_size * n ** -0.51)`, where `t_flat` is the number `n` of tokens at which the two are equal.

    Args:
        t_warmup: The length of the warm-up.
        power: The exponent, 0 or more.
        t_flat: The time at which the fall begins, from the start of training. `None`: the end of the warm-up.
        t_decay: The length of the decay, which ends at `t_max`. 0 for none.
        decay: The shape of the decay.
        alpha_f: The part that the decay leaves of the factor.
        t_max: The end of the decay, from the start of training.
        scale_warmup: Whether the scale schedule ratio scales the ramp.

    Example:
        >>> scheduler = InversePowerWithWarmupScheduler("4000ba")

    Reference:
        Vaswani et al., "Attention Is All You Need", NeurIPS 2017, arXiv:1706.03762, eq. (3). Shen et al., "Power
        Scheduler: A Batch Size and Token Number Agnostic Learning Rate Scheduler", 2024, arXiv:2408.13359.
    """

    def __init__(
        self,
        t_warmup: str | Time,
        power: float = 0.5,
        t_flat: str | Time | None = None,
        t_decay: str | Time = "0ba",
        decay: Decay = "linear",
        alpha_f: float = 0.0,
        t_max: str | Time = "1dur",
        scale_warmup: bool = False,
    ) -> None:
        super().__init__(t_warmup, t_decay, decay, alpha_f, t_max, scale_warmup)
        self.power: float = as_finite("power", power, least=0)
        self.t_flat = parse_length(self.t_warmup if t_flat is None else t_flat, "t_flat")
        self._is_flat_scaled = t_flat is not None or scale_warmup

    def _before_decay(self, time: Time, state: SchedulerState, ssr: float) -> float:
        flat = convert_period(self.t_flat, "t_flat", state, ssr if self._is_flat_scaled else 1.0)
        _check_units("t_flat", flat, time.unit)
        return max(1.0, time.value / flat.value) ** -self.power


def _check_units(name: str, length: Time, unit: TimeUnit) -> None:
    if length.unit != unit:
        raise ValueError(
            f"{name} comes to {str(length)!r} and t_max is counted in {unit.value!r}. Give both in the same unit, or "
            f"both as fractions of the duration such as '0.1dur'."
        )
