"""Refusing arguments of the wrong kind by name, when a callback or a logger is made and not when it is first used."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from composer_time import Time, TimeUnit, ensure_time

__all__ = [
    "check_counts",
    "check_flags",
    "check_functions",
    "check_mappings",
    "check_numbers",
    "check_places",
    "check_seconds",
    "check_text_lists",
    "check_texts",
    "to_time",
]


def check_flags(**flags: Any) -> None:
    """Refuse what is neither true nor false: a text such as 'no' would count as yes.

    Raises:
        TypeError: If one is of another kind.
    """
    for name, value in flags.items():
        if not (isinstance(value, Integral) and value in (0, 1)):
            raise TypeError(f"{name}={value!r} must be True or False.")


def check_counts(least: int = 1, **counts: Any) -> None:
    """Refuse what counts nothing.

    Args:
        least: The smallest number.
        **counts: Whole numbers by the names of their arguments.

    Raises:
        TypeError: If one is no whole number.
        ValueError: If one is less than `least`.
    """
    for name, value in counts.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be a whole number, {least} or more.")
        if value < least:
            raise ValueError(f"{name}={value!r} must be {least} or more.")


def check_numbers(least: float = -math.inf, **numbers: Any) -> None:
    """Refuse what is no number, or less than `least`.

    Raises:
        TypeError: If one is of another kind.
        ValueError: If one is NaN or too small.
    """
    for name, value in numbers.items():
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be a number.")
        if not float(value) >= least:
            raise ValueError(
                f"{name}={value!r} must be a number{'' if least == -math.inf else f', {least:g} or more'}."
            )


def check_seconds(least: float = 0, **lengths: Any) -> None:
    """Refuse what is no number of seconds, or less than `least`.

    Raises:
        TypeError: If one is of another kind.
        ValueError: If one is too small, or not finite.
    """
    check_numbers(least, **lengths)
    for name, value in lengths.items():
        if math.isinf(value):
            raise ValueError(f"{name}={value!r} must be a finite number of seconds.")


def check_texts(*, may_be_none: bool = False, **texts: Any) -> None:
    """Refuse what is no text.

    Raises:
        TypeError: If one is of another kind.
    """
    for name, value in texts.items():
        if not isinstance(value, str) and not (may_be_none and value is None):
            raise TypeError(f"{name}={value!r} must be a text{', or None' if may_be_none else ''}.")


def check_places(*, may_be_none: bool = False, **places: Any) -> None:
    """Refuse what names no file or folder.

    Raises:
        TypeError: If one is neither a text nor a path.
    """
    for name, value in places.items():
        if not isinstance(value, str | os.PathLike) and not (may_be_none and value is None):
            raise TypeError(f"{name}={value!r} must be a text or a path{', or None' if may_be_none else ''}.")


def check_text_lists(**lists: Any) -> None:
    """Refuse what is no list of texts, or `None`. A text alone is none: its letters would be taken for the members.

    Raises:
        TypeError: If one is of another kind.
    """
    for name, value in lists.items():
        is_list = isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes)
        if value is not None and not (is_list and all(isinstance(member, str) for member in value)):
            raise TypeError(f"{name}={value!r} must be a list of texts, such as {[str(value)]!r}, or None.")


def check_mappings(**mappings: Any) -> None:
    """Refuse what is no dict, or `None`.

    Raises:
        TypeError: If one is of another kind.
    """
    for name, value in mappings.items():
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(f"{name}={value!r} must be a dict, or None.")


def check_functions(**functions: Any) -> None:
    """Refuse what cannot be called, and is not `None`.

    Raises:
        TypeError: If one is of another kind.
    """
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise TypeError(f"{name}={value!r} must be a function, or None.")


def to_time(name: str, value: Any, unit: TimeUnit) -> Time[int]:
    """Return an argument that is a length of training.

    Args:
        name: The argument's.
        value: A number, a text or a `Time`.
        unit: What a number counts.

    Raises:
        TypeError: If it is of another kind.
        ValueError: If it is a text that says no time.
    """
    try:
        if isinstance(value, bool):
            raise TypeError("a truth value counts nothing. Accepted: a number and a unit, such as '10ba'.")
        return ensure_time(value, unit)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{name}={value!r} is no length of training: {error}") from error
