"""Whose line a warning of the Trainer is about."""

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["call_for_user", "level_of_user"]

TResult = TypeVar("TResult")

_HERE = str(Path(__file__).parent)


def level_of_user() -> int:
    """Return the `stacklevel`, for the function that asks, of the first line outside the Trainer's own modules."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        level, frame = level + 1, frame.f_back
    return level


def call_for_user(function: Callable[..., TResult], *args: Any) -> TResult:
    """Call a function whose warnings are about the first line outside the Trainer's own modules."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*args)
    for warning in caught:
        warnings.warn(warning.message, warning.category, stacklevel=level_of_user())
    return result
