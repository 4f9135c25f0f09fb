"""Hyperparameters as plain values for loggers, nested or flat."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterator, Mapping
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from composer_events.arguments import loaded
from composer_events.parallelism import get_local_world_size, get_world_size

__all__ = [
    "get_composer_env_dict",
    "convert_flat_dict_to_nested_dict",
    "convert_nested_dict_to_flat_dict",
    "extract_hparams",
]

_SEPARATOR = "/"
_MISSING = object()


def extract_hparams(locals_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce the arguments of a constructor to names and plain values.

    Call it at the start of `__init__`, before other local variables exist.

    Args:
        locals_dict: The result of `locals()`. `self`, names that start with an underscore, and classes whose
            metaclass is `type` are left out.

    Returns:
        By name: a number, a string, a boolean or `None` unchanged; the value of an `Enum`'s member;
        `{class name: local_hparams}` for an object that has `local_hparams`; and the class name for any other object.
        The elements of a list, tuple or dict are reduced likewise, except that a container in it is reduced to its
        class name. Tuples become lists.

    Example:
        >>> class Doubler:
        ...     def __init__(self, width, rates=(0.1, 0.2), seed=None):
        ...         self.local_hparams = extract_hparams(locals())
        >>> Doubler(3).local_hparams
        {'width': 3, 'rates': [0.1, 0.2], 'seed': None}
        >>> extract_hparams({"model": Doubler(3), "callbacks": [object()]})
        {'model': {'Doubler': {'width': 3, 'rates': [0.1, 0.2], 'seed': None}}, 'callbacks': ['object']}
    """
    return {
        name: _reduced(value)
        for name, value in locals_dict.items()
        if not name.startswith("_") and name != "self" and type(value) is not type
    }


def _reduced(value: Any) -> Any:
    if not hasattr(value, "local_hparams"):
        if isinstance(value, list | tuple):
            return [_reduced_element(element) for element in cast("list[Any] | tuple[Any, ...]", value)]
        if isinstance(value, dict):
            return {key: _reduced_element(element) for key, element in cast("dict[Any, Any]", value).items()}
    return _reduced_element(value)


def _reduced_element(value: Any) -> Any:
    own = getattr(value, "local_hparams", _MISSING)
    if own is not _MISSING:
        return {type(value).__name__: own}
    if isinstance(value, Enum):  # before strings and numbers, because a member may also be one
        return value.value
    if value is None or isinstance(value, int | float | str):  # a bool is an int
        return value
    return type(value).__name__


def convert_nested_dict_to_flat_dict(d: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts by joining their keys with `/`.

    Args:
        d: Not changed. An empty dict is kept as a value, so that nothing is lost.
        prefix: Put before each name, separated by `/`, unless it is empty.

    Raises:
        ValueError: If two entries have the same joined name.

    Example:
        >>> convert_nested_dict_to_flat_dict({"optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}, "seed": 1})
        {'optimizer/lr': 0.1, 'optimizer/betas': [0.9, 0.95], 'seed': 1}
    """
    flat: dict[str, Any] = {}
    for path, value in _leaves(d, (prefix,) if prefix else ()):
        name = _SEPARATOR.join(path)
        if name in flat:
            raise ValueError(
                f"two entries of d are called {name!r} when their keys are joined with {_SEPARATOR!r}. Keys may "
                f"contain {_SEPARATOR!r} only if the joined names differ: rename one of the two."
            )
        flat[name] = value
    return flat


def _leaves(nested: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in nested.items():
        here = (*path, str(key))  # extract_hparams keeps the keys of a dict, which may be numbers
        if isinstance(value, Mapping) and value:
            yield from _leaves(cast("Mapping[str, Any]", value), here)
        else:
            yield here, value


def convert_flat_dict_to_nested_dict(d: Mapping[str, Any]) -> dict[str, Any]:
    """Split names at each `/` into nested dicts: the inverse of `convert_nested_dict_to_flat_dict`.

    Args:
        d: Not changed. Values are kept unchanged.

    Raises:
        ValueError: If a name has a value and is also a prefix of others, such as `a` with `a/b`.

    Example:
        >>> convert_flat_dict_to_nested_dict({"optimizer/lr": 0.1, "optimizer/eps": 1e-8, "seed": 1})
        {'optimizer': {'lr': 0.1, 'eps': 1e-08}, 'seed': 1}
    """
    nested: dict[str, Any] = {}
    branches: dict[tuple[str, ...], dict[str, Any]] = {(): nested}  # only dicts created here, never values
    for name, value in d.items():
        path = tuple(name.split(_SEPARATOR))
        for depth in range(1, len(path)):
            if path[:depth] not in branches:
                branches[path[:depth]] = {}
                _put(branches[path[: depth - 1]], path[:depth], branches[path[:depth]])
        _put(branches[path[:-1]], path, value)
    return nested


def _put(branch: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    if path[-1] in branch:
        name = _SEPARATOR.join(path)
        raise ValueError(
            f"{name!r} has a value in d and is also the beginning of other names ({name + _SEPARATOR!r}...). A name "
            f"is one or the other: rename it."
        )
    branch[path[-1]] = value


def get_composer_env_dict() -> dict[str, Any]:
    """Describe the machine and the versions in JSON-compatible values.

    No device is initialized for it: a CUDA device that the process does not use yet is counted but not named.

    Returns:
        A dict with the keys `composer_version`, `composer_commit_hash`, `cpu_model`, `cpu_count`, `num_nodes`,
        `gpu_model`, `num_gpus_per_node`, `num_gpus` and `cuda_device_count`.
    """
    num_devices, gpu_model = 0, "N/A"
    if (torch := loaded("torch")) is not None:
        num_devices = int(torch.cuda.device_count())
        # Otherwise reading a device's name would create a CUDA context, which takes memory.
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            gpu_model = str(torch.cuda.get_device_name())
    # At least 1, even if the environment has only one of the two sizes.
    num_nodes = max(1, get_world_size() // max(1, get_local_world_size()))
    return {
        "composer_version": _composer_version(),
        "composer_commit_hash": None,
        "cpu_model": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "num_nodes": num_nodes,
        "gpu_model": gpu_model,
        "num_gpus_per_node": num_devices,
        "num_gpus": num_devices * num_nodes,
        "cuda_device_count": num_devices,
    }


@functools.cache
def _composer_version() -> str:
    for distribution in ("composer-suite", "composer-events"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "unknown"


@functools.cache
def _cpu_model() -> str:
    # platform.processor() is empty or only the architecture on Linux.
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"
