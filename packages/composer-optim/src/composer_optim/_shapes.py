"""The curves that plain schedulers and those with a warm-up share, over the fraction of the way that is done."""

import math

from composer_optim._numbers import as_finite


def fraction_done(now: int, start: int, end: int) -> float:
    """Return how far `now` is on the way from `start` to `end`, in [0, 1]; 1 where there is no way to go."""
    if end <= start:
        return 1.0
    return min(1.0, max(0.0, (now - start) / (end - start)))


def linear(done: float, alpha_i: float, alpha_f: float) -> float:
    """Go from `alpha_i` to `alpha_f` along a straight line."""
    return alpha_i + done * (alpha_f - alpha_i)


def cosine(done: float, alpha_f: float) -> float:
    """Go from 1 to `alpha_f` along half a period of the cosine."""
    return alpha_f + (1.0 - alpha_f) * 0.5 * (1.0 + math.cos(math.pi * done))


def checked_factor(name: str, factor: float, least: float = -math.inf) -> float:
    """Return what a learning rate is multiplied by.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is NaN, infinite, or less than `least`.
    """
    as_finite(name, factor, least)
    return factor


def checked_power(power: float) -> float:
    """Return the exponent of `polynomial`, which would divide by zero at the end of the way if it were negative."""
    as_finite("power", power, least=0.0)
    return power


def polynomial(done: float, power: float, alpha_f: float) -> float:
    """Go from 1 to `alpha_f` as the `power`-th power of what is left of the way."""
    return alpha_f + (1.0 - alpha_f) * (1.0 - done) ** power
