"""Type checks for arguments whose wrong type would pass unnoticed, or fail only in a later step.

Each `check_` function takes values by the names of their arguments, so that its error names the argument. It raises
`TypeError` for a value of another type and `ValueError` for one out of range.
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
    """Check that arguments are booleans: a string such as 'no' would count as true.

    Args:
        may_be_none: Whether `None` is accepted and means false.

    Example:
        >>> check_flags(overwrite=True)
        >>> check_flags(overwrite="no")
        Traceback (most recent call last):
        TypeError: overwrite='no' must be True or False.
    """
    # Integral, not bool: 0 and 1 are accepted too, also those of NumPy.
    _accept(flags, "True or False", lambda flag: isinstance(flag, Integral) and flag in (0, 1), may_be_none)


def _accept(
    values: Mapping[str, Any], accepted: str, is_accepted: Callable[[Any], bool], may_be_none: bool = True
) -> None:
    for name, value in values.items():
        if not is_accepted(value) and not (may_be_none and value is None):
            raise TypeError(f"{name}={value!r} must be {accepted}.")


def check_counts(least: int = 1, **counts: Any) -> None:
    """Check that arguments are whole numbers of at least `least`.

    Args:
        least: The smallest accepted number.
    """
    for name, value in counts.items():
        # bool is a subclass of int, but True as a count is a mistake.
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name}={value!r} must be a whole number, {least} or more.")
        if value < least:
            raise ValueError(f"{name}={value!r} must be {least} or more.")


def check_numbers(least: float = -math.inf, **numbers: Any) -> None:
    """Check that arguments are numbers of at least `least`.

    Args:
        least: The smallest accepted number.
    """
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name}={value!r} must be a number.")
        if not float(value) >= least:  # not `<`, so that NaN is rejected as well
            raise ValueError(
                f"{name}={value!r} must be a number{'' if least == -math.inf else f', {least:g} or more'}."
            )


def check_seconds(*, may_be_zero: bool = False, may_be_none: bool = False, **lengths: Any) -> None:
    """Check that arguments are durations in seconds.

    Args:
        may_be_zero: Whether 0 is accepted.
        may_be_none: Whether `None` is accepted and means no limit.
        **lengths: Seconds by the names of their arguments.
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
    """Check that arguments are strings.

    Args:
        may_be_none: Whether `None` is accepted.
    """
    _accept(texts, f"a text{', or None' if may_be_none else ''}", lambda text: isinstance(text, str), may_be_none)


def check_places(*, may_be_none: bool = False, **places: Any) -> None:
    """Check that arguments are strings or path objects.

    Args:
        may_be_none: Whether `None` is accepted.
    """
    accepted = f"a text or a path{', or None' if may_be_none else ''}"
    _accept(places, accepted, lambda place: isinstance(place, str | os.PathLike), may_be_none)


def check_names(example: str, **names: Any) -> None:
    """Check that arguments are file names, or `None` for no file.

    Args:
        example: A valid name, for the error message.
    """
    for name, value in names.items():
        accepted = f"a name such as {example!r}, or None for no such file"
        if value is None:
            continue
        if not isinstance(value, str | os.PathLike):
            raise TypeError(f"{name}={value!r} must be {accepted}.")
        # A name that consists of slashes would be a folder.
        if not os.fspath(cast("str | os.PathLike[str]", value)).strip("/ "):
            raise ValueError(f"{name}={value!r} is empty, and must be {accepted}.")


def check_text_lists(**lists: Any) -> None:
    """Check that arguments are lists of strings or `None`. A lone string would be read as a list of its letters."""
    for name, value in lists.items():
        if value is not None and not is_list_of_texts(value):
            raise TypeError(f"{name}={value!r} must be a list of texts, such as {[str(value)]!r}, or None.")


def check_mappings(**mappings: Any) -> None:
    """Check that arguments are dicts with string keys, or `None`."""

    def has_text_keys(value: Any) -> bool:
        return isinstance(value, Mapping) and is_list_of_texts(list(cast("Mapping[Any, Any]", value)))

    _accept(mappings, "a dict whose keys are texts, or None", has_text_keys)


def check_functions(**functions: Any) -> None:
    """Check that arguments are callable or `None`."""
    _accept(functions, "a function, or None", callable)


def to_time(name: str, value: Any, unit: TimeUnit | None = None) -> Time[Any]:
    """Convert an argument to a length of training.

    Args:
        name: The argument's name.
        value: A timestring, a `Time`, or, if `unit` is given, a number.
        unit: The unit of a plain number. With `None` plain numbers are rejected.

    Raises:
        TypeError: If the value has another type.
        ValueError: If the value is a string that is not a timestring.
    """
    try:
        if isinstance(value, bool):
            raise TypeError("a bool is not a number. Accepted: a number and a unit, such as '10ba'.")
        return Time.from_input(value) if unit is None else ensure_time(value, unit)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = ValueError if isinstance(value, str) else TypeError  # a string has the right type
        raise kind(f"{name}={value!r} is not a length of training: {error}") from error


def to_interval(name: str, value: Any) -> Time[Any] | Callable[..., bool]:
    """Convert an interval argument; functions are returned unchanged.

    Args:
        name: The argument's name.
        value: A function of a state and an event, a timestring, a `Time`, or a number of epochs.

    Raises:
        TypeError: If the value has another type, or is a function that cannot be called with a state and an event.
        ValueError: If the value is a string that is not a timestring, or less than 0.
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
    except (TypeError, ValueError):  # some functions implemented in C have no signature
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"{name}={function!r} cannot be called with a state and an event ({error}). Give a function of these two, "
            f"or a time such as '100ba'."
        ) from error


def is_list_of_texts(value: object) -> bool:
    """Return whether a value is a list or set of strings; a lone string is not."""
    is_list = isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes)
    return is_list and all(isinstance(text, str) for text in cast("Iterable[object]", value))


# Without its module no object of torch or an optional package exists, and a check for one must not import it, which
# takes seconds. An alias, because some of these checks run for each value in a step.
loaded: Callable[[str], Any] = sys.modules.get
"""Return a module by name if the process has imported it, else `None`."""


_STATE_GROUP = "composer_events.state"
_ALGORITHM_GROUP = "composer_events.algorithms"


def to_device(device: Any) -> Any:
    """Convert a name or `None` to a device object; objects are returned unchanged.

    Without an installed package that provides devices, a name is returned unchanged.
    """
    if not isinstance(device, str) and device is not None:
        return device
    if device is None and loaded("torch") is None:
        return None  # no tensors exist yet, and choosing a device would import torch
    get_device = provider("device")
    return device if get_device is None else get_device(device)


def to_precision(precision: Any) -> Any:
    """Convert a name to a precision, `None` to `'fp32'`; objects are returned unchanged.

    Without an installed package that provides precisions, a name is returned unchanged.
    """
    if precision is None:
        precision = "fp32"
        # As in `to_device`: a default must not import torch.
        if loaded("torch") is None:
            return precision
    if not isinstance(precision, str):
        return precision
    coerce = provider("precision")
    return precision if coerce is None else coerce(precision)


def algorithm_modules() -> tuple[ModuleType, ...]:
    """Import the installed modules that contain algorithms."""
    return tuple(point.load() for point in entry_points(group=_ALGORITHM_GROUP))


@functools.cache  # reading the metadata of every installed package takes milliseconds
def provider(name: str) -> Callable[..., Any] | None:
    """Return what an installed package provides for `State` under a name, or `None`."""
    for point in entry_points(group=_STATE_GROUP, name=name):
        return point.load()
    return None


def overrides(thing: object, base: type, method: str) -> bool:
    """Return whether an object overrides a method of `base`.

    The result is true for an object that does not derive from `base`, whose methods may do anything.
    """
    cls = type(thing)
    if not issubclass(cls, base):
        return True
    # Also in `vars`, because tests set methods on the object itself.
    return getattr(cls, method) is not getattr(base, method) or method in vars(thing)
