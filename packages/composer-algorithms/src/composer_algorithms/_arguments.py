"""Argument checks, and deprecated argument names of older releases."""

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

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
                value = positional[num_classes_position]
                if isinstance(value, int) and value > 1:  # otherwise it is the argument that follows
                    text = f"{owner} does not take the number of classes ({value!r}) any more: leave it out."
                    warn_deprecated(text, stacklevel=2)
                    positional = positional[:num_classes_position] + positional[num_classes_position + 1 :]
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


def check_interval(interval: str, /, **numbers: Any) -> None:
    """Validate that arguments are numbers, not booleans, in an interval such as `'[0, 1)'`; NaN is in none."""
    low, high = map(float, interval[1:-1].split(","))
    for name, value in numbers.items():
        # NumPy numbers and one-element tensors pass: they have __float__ without being registered as numbers.Real.
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            raise TypeError(f"{name}={value!r} is not a number: pass one in {interval}.")
        is_open_end = (value == low and interval[0] == "(") or (value == high and interval[-1] == ")")
        if is_open_end or not low <= value <= high:
            raise ValueError(f"{name}={value!r} is not in {interval}.")


def check_counts(least: int = 1, /, **counts: Any) -> None:
    """Validate that arguments are whole numbers of at least `least`."""
    check_interval(f"[{least}, inf)", **counts)
    for name, value in counts.items():
        if not isinstance(value, Integral):
            raise TypeError(f"{name}={value!r} is not a whole number: pass {least} or more.")


def check_choice(choices: Collection[str], /, **values: Any) -> None:
    """Validate that arguments are among the given names."""
    for name, value in values.items():
        if value not in choices:
            raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(map(repr, choices))}.")


def takes_keyword(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function can be called with a keyword argument of that name."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
