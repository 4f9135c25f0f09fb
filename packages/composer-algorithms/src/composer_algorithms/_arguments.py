"""Argument checks, and deprecated argument names of older releases."""

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
    """Accept keyword arguments under their names in older releases, with a `DeprecationWarning`.

    Args:
        owner: Name of the function in messages (`'MixUp'`).
        renamed: Maps each old name to the new one.
        ignored: Old names whose values no longer have a meaning.
        num_classes_position: Former position of the number of classes. An integer above 1 at this position is dropped.
    """
    new_names = renamed or {}
    old_names = {*new_names, *ignored}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def accepting_legacy(*args: P.args, **kwargs: P.kwargs) -> R:
            positional: tuple[Any, ...] = args
            if num_classes_position is not None and len(args) > num_classes_position:  # as in older releases
                positional = _without_num_classes(owner, args, num_classes_position)
            if not kwargs.keys().isdisjoint(old_names):
                _translate(owner, kwargs, new_names, ignored)
            return function(*positional, **kwargs)

        return accepting_legacy

    return decorate


def warn_deprecated(message: str, stacklevel: int) -> None:
    """Warn about a deprecated spelling; `stacklevel` counts from the caller of this function."""
    warnings.warn(
        f"{message} The old spelling stops being accepted in composer-algorithms 1.0.",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )


def _without_num_classes(owner: str, args: tuple[Any, ...], position: int) -> tuple[Any, ...]:
    value = args[position]
    if not isinstance(value, int) or value <= 1:  # then it is the argument that follows
        return args
    warn_deprecated(f"{owner} does not take the number of classes ({value!r}) any more: leave it out.", stacklevel=3)
    return args[:position] + args[position + 1 :]


def _translate(owner: str, kwargs: dict[str, Any], renamed: Mapping[str, str], ignored: Collection[str]) -> None:
    for name in [name for name in kwargs if name in renamed or name in ignored]:  # a list, since kwargs changes below
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
    """Validate that an argument is a number. The caller checks its range.

    Args:
        argument: Name of the argument in the message.
        value: Value to check.
        accepted: Valid values, for the message.

    Raises:
        TypeError: If `value` is not a number. Booleans are rejected, too.
    """
    # NumPy numbers and one-element tensors pass: they have __float__ without being registered as numbers.Real.
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{argument}={value!r} is not a number: pass {accepted}.")


def check_count(argument: str, value: Any, of: str, least: int = 1) -> None:
    """Validate that an argument is a whole number of at least `least`.

    Args:
        argument: Name of the argument in the message.
        value: Value to check.
        of: Counted unit, for the message.
        least: Smallest valid value.

    Raises:
        TypeError: If `value` is not an integer.
        ValueError: If `value` is less than `least`, or NaN.
    """
    check_number(argument, value, f"a whole number, {least} or more")
    if not value >= least:  # also true for NaN
        raise ValueError(f"{argument}={value!r} is not a number of {of}: pass {least} or more.")
    if not isinstance(value, Integral):
        raise TypeError(f"{argument}={value!r} is not a whole number: pass {least} or more {of}.")


def check_is_module(model: object, lacks: str) -> None:
    """Raise `TypeError` unless `model` is a module; `lacks` names what it has none of (`'filters to convert'`)."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{model!r} is not a torch.nn.Module, so it has no {lacks}: pass the model.")
