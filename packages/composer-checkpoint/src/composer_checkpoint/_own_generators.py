"""Whether an object draws from generators of its own, instead of from those of its process."""

import functools
import random
from collections import deque
from collections.abc import Iterable
from itertools import islice
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

__all__ = ["holds_generators"]

_KINDS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_LEAVES = (str, bytes, int, float, bool, type(None), type, ModuleType, np.ndarray, torch.Tensor)
_MAX_OBJECTS = 5_000
_MAX_ITEMS = 64  # a dataset may list millions of samples, which are all alike, and has few transforms


def holds_generators(*holders: object) -> bool:
    """Say whether objects hold random number generators, in attributes, arguments, closures, or what those hold.

    The generators of the process do not count. The search is cut short where there is very much to look at.

    Example:
        >>> holds_generators({"transforms": [random.Random(3)]}), holds_generators([torch.rand(2), random.uniform])
        (True, False)
    """
    of_process = [_owner(random.random), _owner(np.random.rand), torch.default_generator]
    waiting, seen = deque(holders), set[int]()
    while waiting and len(seen) < _MAX_OBJECTS:
        value = waiting.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen or any(value is known for known in of_process):
            continue
        if isinstance(value, _KINDS):
            return True
        seen.add(id(value))
        waiting.extend(_inside(value))
    return False


def _inside(value: Any) -> Iterable[object]:
    match value:
        case dict():
            return list(islice(value.values(), _MAX_ITEMS))
        case list() | tuple() | set():
            return list(islice(value, _MAX_ITEMS))
        case functools.partial():
            return [value.func, *value.args, *value.keywords.values()]
        case FunctionType():
            return [_content(cell) for cell in value.__closure__ or ()]
        case MethodType():
            return [value.__self__]
        case _:
            return list(getattr(value, "__dict__", {}).values())


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _owner(function: Any) -> object:
    """Return the generator of the process that a function of a module draws from."""
    return getattr(function, "__self__", None)
