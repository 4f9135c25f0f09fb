"""What neighbouring packages lend to `State` by name, since packages on one floor do not import each other."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

__all__ = ["algorithm_modules", "to_device", "to_precision"]

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
