"""Refuse what is no number where an algorithm needs one, by the name of the argument."""

from numbers import Integral
from typing import Any


def check_number(argument: str, value: Any, accepted: str) -> None:
    """Refuse what is no number; which numbers are accepted is for the caller to check.

    Args:
        argument: What the user calls it.
        value: What was given.
        accepted: What to pass instead, for the message.

    Raises:
        TypeError: If it is of another kind, as `True` and `False` are.
    """
    # NumPy's numbers and tensors with one value are welcome.
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{argument}={value!r} is not a number: pass {accepted}.")


def check_count(argument: str, value: Any, of: str, least: int = 1) -> None:
    """Refuse what does not count something.

    Args:
        argument: What the user calls it.
        value: What was given.
        of: What it counts, for the message.
        least: The smallest number.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it is less than `least`, or NaN.
    """
    check_number(argument, value, f"a whole number, {least} or more")
    if not value >= least:
        raise ValueError(f"{argument}={value!r} is not a number of {of}: pass {least} or more.")
    if not isinstance(value, Integral):
        raise TypeError(f"{argument}={value!r} is not a whole number: pass {least} or more {of}.")
