"""Refusing arguments of the wrong kind by name, when an object is made and not when it is first used."""

import math
import os
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from composer_time import Time, TimeUnit, ensure_time

__all__ = [
    "check_counts",
    "check_flags",
    "check_mappings",
    "check_names",
    "check_places",
    "check_seconds",
    "check_texts",
    "to_time",
]


def check_flags(**flags: Any) -> None:
    """Refuse what is neither true nor false: a text such as 'no' would count as yes. `None` counts as no.

    Raises:
        TypeError: If one is of another kind.
    """
    for name, value in flags.items():
        if value is not None and not (isinstance(value, Integral) and value in (0, 1)):
            raise TypeError(f"{name}={value!r} says neither yes nor no. Pass True or False.")


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
            raise TypeError(f"{name}={value!r} is no count. Pass a whole number, {least} or more.")
        if value < least:
            raise ValueError(f"{name}={value!r} is no count: it must be {least} or more.")


def check_seconds(*, may_be_none: bool = False, **lengths: Any) -> None:
    """Refuse what is no time that one could wait.

    Raises:
        TypeError: If one is no number.
        ValueError: If one is 0 or less, or not finite.
    """
    or_none = ", or None to wait as long as it takes" if may_be_none else ""
    for name, value in lengths.items():
        if may_be_none and value is None:
            continue
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is no number. Pass seconds, more than 0{or_none}.")
        if not 0 < float(value) < math.inf:
            raise ValueError(f"{name}={value!r} is no time to wait. Pass seconds, more than 0{or_none}.")


def check_places(**places: Any) -> None:
    """Refuse what names no file or folder.

    Raises:
        TypeError: If one is neither a text nor a path.
    """
    for name, value in places.items():
        if not isinstance(value, str | os.PathLike):
            raise TypeError(f"{name}={value!r} names no file and no folder. Pass a text or a path.")


def check_texts(**texts: Any) -> None:
    """Refuse what is no text.

    Raises:
        TypeError: If one is of another kind.
    """
    for name, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"{name}={value!r} is no text. Pass one.")


def check_names(example: str, **names: Any) -> None:
    """Refuse what is no name of a file, or `None` for no file.

    Args:
        example: One that would do.
        **names: Texts or paths by the names of their arguments.

    Raises:
        TypeError: If one is neither a text nor a path.
        ValueError: If one is empty.
    """
    for name, value in names.items():
        if value is not None and not isinstance(value, str | os.PathLike):
            raise TypeError(f"{name}={value!r} is no name. Pass a text such as {example!r}, or None for no such file.")
        if value is not None and not os.fspath(value).strip("/ "):
            raise ValueError(f"{name}={value!r} is empty. Pass a name such as {example!r}, or None for no such file.")


def check_mappings(**mappings: Any) -> None:
    """Refuse what is no dict whose keys are texts, or `None`.

    Raises:
        TypeError: If one is of another kind.
    """
    for name, value in mappings.items():
        is_dict = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        if value is not None and not is_dict:
            raise TypeError(f"{name}={value!r} is no dict of arguments by their names. Pass one, or None.")


def to_time(name: str, value: Any, unit: TimeUnit | None = None) -> Time[Any]:
    """Return an argument that is a length of training.

    Args:
        name: The argument's.
        value: A text, a `Time`, or where there is a unit for it, a number.
        unit: What a number counts. `None` takes none.

    Raises:
        TypeError: If it is of another kind.
        ValueError: If it is a text that says no time.
    """
    try:
        if isinstance(value, bool):
            raise TypeError("a truth value counts nothing. Accepted: a number and a unit, such as '10ba'.")
        return Time.from_input(value) if unit is None else ensure_time(value, unit)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{name}={value!r} is no length of training: {error}") from error
