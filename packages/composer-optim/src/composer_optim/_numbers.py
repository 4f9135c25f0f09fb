"""Numbers and flags, checked where they are given. Without torch, since schedulers come without it."""

import math
from numbers import Real

__all__ = ["as_finite", "check_flag"]


def as_finite(name: str, value: object, least: float = -math.inf) -> float:
    """Return a number as a float.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is NaN, infinite, too large for a float, or less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} is not a number. Give one, such as 0.1.")
    try:
        number = float(value)
    except OverflowError:
        number, value = math.inf, "a number larger than any float"  # whose thousands of digits Python does not write
    if not math.isfinite(number) or number < least:
        at_least = "" if least == -math.inf else f"{least:g} or more and "
        raise ValueError(f"{name}={value!r} must be {at_least}finite. Give a number such as 0.1.")
    return number


def check_flag(name: str, value: object) -> None:
    """Raise TypeError if a value is neither true nor false, such as the text 'False'."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is neither True nor False.")
