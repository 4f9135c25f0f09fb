"""Values that plain `torch.load(path, weights_only=True)` has no form for, saved as values that it has.

A length of time is saved as its seconds, a NumPy array as a tensor, a deque as a list. The manifest notes where, so
that this package gives back what was saved. NumPy scalars and versions become numbers and strings for good.
"""

import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch

from composer_checkpoint._tree import Names, map_tree, text_of
from composer_checkpoint.manifest import Manifest

__all__ = ["decode", "encode", "notes_of", "noted_in", "noted_names"]

_BITS = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128)}
_SHARED_DTYPES = frozenset(["bool", *(f"{kind}{bits}" for kind, sizes in _BITS.items() for bits in sizes)])

_BOUNDED_DEQUE = "deque of at most "
_NOTED = "noted"
_NOTED_BEFORE = "encoded"  # under names that did not tell every key from every other
_NUMBER = re.compile(r"-?\d+")

# What a defaultdict may start from, by the kind that the manifest notes.
_FACTORIES: dict[str, Any] = {
    "defaultdict": None,
    **{f"defaultdict of {factory.__name__}": factory for factory in (int, float, list, dict, set)},
}
_FACTORY_KINDS = {factory: kind for kind, factory in _FACTORIES.items()}


def encode(obj: Any) -> tuple[Any, dict[str, str]]:
    """Return the object for saving, and the kind of each value that must be turned back. `obj` is not changed."""
    kinds: dict[str, str] = {}

    def change(name: str, value: Any) -> Any:
        kind, plain = _plain_form(value)
        if kind is not None:
            kinds[name] = kind
        return plain

    return map_tree(obj, change, shared=True, names=noted_names()), kinds


def notes_of(kinds: Mapping[str, str]) -> dict[str, Any]:
    """Return how a manifest notes kinds."""
    return {_NOTED: dict(kinds)} if kinds else {}


def noted_in(manifest: Manifest | None) -> tuple[Mapping[str, Any], Callable[[], Names]]:
    """Return the kinds that a manifest notes, and what makes the names under which it does."""
    info = {} if manifest is None else manifest.info
    for key, names in ((_NOTED, noted_names), (_NOTED_BEFORE, Names)):
        if isinstance(kinds := info.get(key), dict):
            return cast("dict[str, Any]", kinds), names
    return {}, noted_names


def noted_names() -> Names:
    """Return what makes the names under which the manifest notes kinds: keys joined by slashes, no two places alike.

    Keys with a slash are told from the keys on a way, and texts from numbers, by what `~` stands before.
    """
    return Names(text=_noted)


def _noted(key: object) -> str:
    if type(key) is int:
        return text_of(key)
    if not isinstance(key, str):
        return f"~3{text_of(key)}"
    escaped = str(key).replace("~", "~0").replace("/", "~1")
    return f"~2{escaped}" if _NUMBER.fullmatch(escaped) else escaped


def _plain_form(value: Any) -> tuple[str | None, Any]:
    """Return what to save for one value, and how to call it if it must be turned back."""
    if isinstance(value, torch.Tensor):  # whose bytes are not its elements where torch conjugates or negates lazily
        return None, value.resolve_conj().resolve_neg() if value.is_conj() or value.is_neg() else value
    if isinstance(value, timedelta):
        return "timedelta", value.total_seconds()  # exact to the microsecond for 285 years
    if type(value) is np.ndarray and value.dtype.name in _SHARED_DTYPES and value.dtype.isnative:
        return "ndarray", torch.from_numpy(value.copy())
    if type(value) is deque:
        return "deque" if value.maxlen is None else f"{_BOUNDED_DEQUE}{value.maxlen}", list(value)
    if type(value) is frozenset:
        return "frozenset", set(value)
    if type(value) is defaultdict and value.default_factory in _FACTORY_KINDS:
        return _FACTORY_KINDS[value.default_factory], dict(value)
    if isinstance(value, np.generic):
        return None, value.item()
    if isinstance(value, str) and type(value) is not str:
        return None, str.__str__(value)
    return None, value


def decode(obj: Any, kinds: Mapping[str, Any], names: Callable[[], Names] = noted_names) -> Any:
    """Return what was given to `encode`.

    Args:
        obj: What was read.
        kinds: By name, those of `encode`.
        names: Makes these names.
    """

    def change(name: str, value: Any) -> Any:
        match kinds.get(name), value:
            case "timedelta", float():
                return timedelta(seconds=value)
            case "ndarray", torch.Tensor():
                return value.numpy(force=True)
            case "deque", list():
                return deque(value)
            case str() as kind, list() if kind.startswith(_BOUNDED_DEQUE):
                length = kind.removeprefix(_BOUNDED_DEQUE)
                return deque(value, int(length) if length.isascii() and length.isdigit() else None)
            case "frozenset", set():
                return frozenset(value)
            case str() as kind, dict() if kind in _FACTORIES:
                return defaultdict(_FACTORIES[kind], value)
            case _:
                return value

    return map_tree(obj, change, shared=True, inside_out=True, names=names()) if kinds else obj
