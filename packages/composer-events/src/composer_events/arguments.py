"""Refusing arguments of the wrong kind by name, when a callback or a logger is made and not when it is first used.

Each function takes arguments by their names, so that its error can say which one is meant.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from numbers import Integral, Real
from types import ModuleType
from typing import Any, cast

from composer_time import Time, TimeUnit, ensure_time

__all__ = [
    "check_counts",
    "check_flags",
    "check_functions",
    "check_mappings",
    "check_names",
    "check_numbers",
    "check_places",
    "check_seconds",
    "check_text_lists",
    "check_texts",
    "to_interval",
    "to_time",
]


def check_flags(*, may_be_none: bool = False, **flags: Any) -> None:
    """Refuse what is neither true nor false: a text such as 'no' would count as yes.

    Args:
        may_be_none: Whether `None` is taken, for no.
        **flags: Truth values by the names of their arguments.

    Raises:
        TypeError: If one is of another kind.

    Example:
        >>> check_flags(overwrite=True)
        >>> check_flags(overwrite="no")
        Traceback (most recent call last):
        TypeError: overwrite='no' must be True or False.
    """
    for name, value in flags.items():
        if not (isinstance(value, Integral) and value in (0, 1)) and not (may_be_none and value is None):
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
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name}={value!r} must be a whole number, {least} or more.")
        if value < least:
            raise ValueError(f"{name}={value!r} must be {least} or more.")


def check_numbers(least: float = -math.inf, **numbers: Any) -> None:
    """Refuse what is no number, or less than `least`.

    Args:
        least: The smallest number.
        **numbers: Numbers by the names of their arguments.

    Raises:
        TypeError: If one is of another kind.
        ValueError: If one is NaN or too small.
    """
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name}={value!r} must be a number.")
        if not float(value) >= least:
            raise ValueError(
                f"{name}={value!r} must be a number{'' if least == -math.inf else f', {least:g} or more'}."
            )


def check_seconds(*, may_be_zero: bool = False, may_be_none: bool = False, **lengths: Any) -> None:
    """Refuse what is no time that one could wait.

    Args:
        may_be_zero: Whether 0 is taken.
        may_be_none: Whether `None` is taken, for as long as it takes.
        **lengths: Seconds by the names of their arguments.

    Raises:
        TypeError: If one is no number.
        ValueError: If one is too small, or not finite.
    """
    accepted = f"a finite number of seconds, {'0 or more' if may_be_zero else 'more than 0'}"
    accepted += ", or None to wait as long as it takes" if may_be_none else ""
    for name, value in lengths.items():
        if may_be_none and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name}={value!r} must be {accepted}.")
        if not 0 <= float(value) < math.inf or (value == 0 and not may_be_zero):
            raise ValueError(f"{name}={value!r} must be {accepted}.")


def check_texts(*, may_be_none: bool = False, **texts: Any) -> None:
    """Refuse what is no text.

    Args:
        may_be_none: Whether `None` is taken.
        **texts: Texts by the names of their arguments.

    Raises:
        TypeError: If one is of another kind.
    """
    for name, value in texts.items():
        if not isinstance(value, str) and not (may_be_none and value is None):
            raise TypeError(f"{name}={value!r} must be a text{', or None' if may_be_none else ''}.")


def check_places(*, may_be_none: bool = False, **places: Any) -> None:
    """Refuse what names no file or folder.

    Args:
        may_be_none: Whether `None` is taken.
        **places: Texts or paths by the names of their arguments.

    Raises:
        TypeError: If one is neither a text nor a path.
    """
    for name, value in places.items():
        if not isinstance(value, str | os.PathLike) and not (may_be_none and value is None):
            raise TypeError(f"{name}={value!r} must be a text or a path{', or None' if may_be_none else ''}.")


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
        accepted = f"a name such as {example!r}, or None for no such file"
        if value is None:
            continue
        if not isinstance(value, str | os.PathLike):
            raise TypeError(f"{name}={value!r} must be {accepted}.")
        if not os.fspath(cast("str | os.PathLike[str]", value)).strip("/ "):
            raise ValueError(f"{name}={value!r} is empty, and must be {accepted}.")


def check_text_lists(**lists: Any) -> None:
    """Refuse what is no list of texts, or `None`. A text alone is none: its letters would be taken for the members.

    Args:
        **lists: Lists by the names of their arguments.

    Raises:
        TypeError: If one is of another kind.
    """
    for name, value in lists.items():
        if value is not None and not _is_list_of_texts(value):
            raise TypeError(f"{name}={value!r} must be a list of texts, such as {[str(value)]!r}, or None.")


def check_mappings(**mappings: Any) -> None:
    """Refuse what is no dict whose keys are texts, or `None`.

    Args:
        **mappings: Dicts by the names of their arguments.

    Raises:
        TypeError: If one is of another kind.
    """
    for name, value in mappings.items():
        if value is not None and not _is_dict_of_texts(value):
            raise TypeError(f"{name}={value!r} must be a dict whose keys are texts, or None.")


def check_functions(**functions: Any) -> None:
    """Refuse what cannot be called, and is not `None`.

    Args:
        **functions: Functions by the names of their arguments.

    Raises:
        TypeError: If one is of another kind.
    """
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise TypeError(f"{name}={value!r} must be a function, or None.")


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


def to_interval(name: str, value: Any) -> Time[Any] | Callable[..., bool]:
    """Return an argument that says how often something is done, or a function that says when.

    Args:
        name: The argument's.
        value: A function, a text, a `Time`, or a number of epochs.

    Raises:
        TypeError: If it is of another kind, or a function that cannot be called with a state and an event.
        ValueError: If it is a text that says no time, or less than 0.
    """
    if callable(value):
        _check_takes_two(name, value)
        return cast("Callable[..., bool]", value)
    interval = to_time(name, value, TimeUnit.EPOCH)
    if interval.value < 0:
        raise ValueError(
            f"{name}={value!r} is less than 0. Give how often, such as 1 (epoch) or '100ba', or 0 for never."
        )
    return interval


def _check_takes_two(name: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some of C's have none
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"{name}={function!r} cannot be called with a state and an event ({error}). Give a function of these two, "
            f"or a time such as '100ba'."
        ) from error


def _is_list_of_texts(value: object) -> bool:
    is_list = isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes)
    return is_list and _are_texts(cast("Iterable[object]", value))


def _is_dict_of_texts(value: object) -> bool:
    return isinstance(value, Mapping) and _are_texts(cast("Mapping[object, object]", value))


def _are_texts(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


_STATE_GROUP = "composer_events.state"
_ALGORITHM_GROUP = "composer_events.algorithms"


def to_device(device: Any) -> Any:
    """Make a device object of a name, or of `None`; give objects back as they are.

    Without a package that provides devices a name stays a name.
    """
    if not isinstance(device, str) and device is not None:
        return device
    if device is None and "torch" not in sys.modules:
        return None  # there are no tensors to place, and asking for a device would import torch
    get_device = _provider("device")
    return device if get_device is None else get_device(device)


def to_precision(precision: Any) -> Any:
    """Make a precision of its name, `'fp32'` for `None`; give objects back as they are.

    Without a package that provides precisions a name stays a name.
    """
    if precision is None:
        precision = "fp32"
        if "torch" not in sys.modules:
            return precision
    if not isinstance(precision, str):
        return precision
    coerce = _provider("precision")
    return precision if coerce is None else coerce(precision)


def algorithm_modules() -> tuple[ModuleType, ...]:
    """Import the installed packages that hold algorithms."""
    return tuple(point.load() for point in entry_points(group=_ALGORITHM_GROUP))


@functools.cache  # reading the metadata of every installed package takes milliseconds
def _provider(name: str) -> Callable[[Any], Any] | None:
    for point in entry_points(group=_STATE_GROUP, name=name):
        return point.load()
    return None


def overrides(thing: object, base: type, method: str) -> bool:
    """Answer whether calling the method on this object can do anything that the base's would not.

    An object that does not derive from `base` is only known by what it does, so the answer is yes.
    """
    cls = type(thing)
    if not issubclass(cls, base):
        return True
    return getattr(cls, method) is not getattr(base, method) or method in vars(thing)
