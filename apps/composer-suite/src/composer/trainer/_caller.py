"""Whose line a warning of the Trainer is about."""

import inspect
from pathlib import Path

__all__ = ["level_of_user"]

_HERE = str(Path(__file__).parent)


def level_of_user() -> int:
    """Return the `stacklevel`, for the function that asks, of the first line outside the Trainer's own modules."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        level, frame = level + 1, frame.f_back
    return level
