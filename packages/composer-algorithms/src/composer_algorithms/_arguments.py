"""Argument names of Composer's older releases, accepted with a DeprecationWarning."""

import functools
import warnings
from collections.abc import Callable, Collection, Mapping
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

from torch import nn

__all__ = ["check_is_module"]

P = ParamSpec("P")
R = TypeVar("R")


def accept_legacy_arguments(
    owner: str,
    renamed: Mapping[str, str] | None = None,
    ignored: Collection[str] = (),
    num_classes_position: int | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take keyword arguments by the names that they had in older releases.

    Args:
        owner: How the caller calls the function (`'MixUp'`), for the messages.
        renamed: From each old name to the new one.
        ignored: Old names whose values have no meaning any more.
        num_classes_position: Where a number of classes used to stand. An integer above 1 found there is dropped.
    """
    new_names = renamed or {}
    old_names = {*new_names, *ignored}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def accepting_legacy(*args: P.args, **kwargs: P.kwargs) -> R:
            positional: tuple[Any, ...] = args
            if num_classes_position is not None and len(args) > num_classes_position:
                positional = _without_num_classes(owner, args, num_classes_position)
            if not kwargs.keys().isdisjoint(old_names):
                _translate(owner, kwargs, new_names, ignored)
            return function(*positional, **kwargs)

        return accepting_legacy

    return decorate


def warn_deprecated(message: str, stacklevel: int) -> None:
    """Warn of a spelling that goes away; `stacklevel` counts from the caller of this function."""
    warnings.warn(
        f"{message} The old spelling stops being accepted in composer-algorithms 1.0.",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )


def _without_num_classes(owner: str, args: tuple[Any, ...], position: int) -> tuple[Any, ...]:
    value = args[position]
    if not isinstance(value, int) or value <= 1:
        return args
    warn_deprecated(f"{owner} does not take the number of classes ({value!r}) any more: leave it out.", stacklevel=3)
    return args[:position] + args[position + 1 :]


def _translate(owner: str, kwargs: dict[str, Any], renamed: Mapping[str, str], ignored: Collection[str]) -> None:
    for name in [name for name in kwargs if name in renamed or name in ignored]:
        value = kwargs.pop(name)
        if name in ignored:
            warn_deprecated(f"{owner}({name}={value!r}) has no effect any more: leave {name} out.", stacklevel=3)
            continue
        new_name = renamed[name]
        if new_name in kwargs:
            raise TypeError(
                f"{owner} got {name}={value!r} and {new_name}={kwargs[new_name]!r}, the old and the new name of one "
                f"argument: pass {new_name} only."
            )
        kwargs[new_name] = value
        warn_deprecated(f"{owner}({name}=...) is now called {new_name}: write {new_name}={value!r}.", stacklevel=3)


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


def check_is_module(model: object, lacks: str) -> None:
    """Refuse what is no module, and say what it lacks (`'filters to convert'`)."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{model!r} is no torch.nn.Module, so it has no {lacks}: pass the model.")
