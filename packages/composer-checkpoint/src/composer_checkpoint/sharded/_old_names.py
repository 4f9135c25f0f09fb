"""The names that torch gave to entries of nested state dicts up to version 2.3."""

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["flatten_as_torch_2_3"]

Path = tuple[str | int, ...]


def flatten_as_torch_2_3(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the entries by name, and where each belongs.

    Since torch 2.4 every dict is taken apart. Before, one that held neither tensors nor such containers was one entry,
    as the groups of an optimizer were.

    Example:
        >>> flat, paths = flatten_as_torch_2_3({"optim": {"groups": [{"lr": 0.1}]}, "w": torch.ones(1)})
        >>> sorted(flat)
        ['optim', 'w']
    """
    flat: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    pending: list[tuple[Path, Any]] = [((str(key),), value) for key, value in reversed([*state_dict.items()])]
    while pending:
        path, value = pending.pop()
        if _is_entry(value):
            name = ".".join(map(str, path))
            flat[name], paths[name] = value, path
        elif isinstance(value, Mapping):
            pending.extend(((*path, str(key)), item) for key, item in reversed([*value.items()]))
        else:
            pending.extend(((*path, i), item) for i, item in reversed(list(enumerate(value))))
    return flat, paths


def _is_entry(value: object) -> bool:
    if isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, list):
        items = value
    else:
        return True
    return not any(
        isinstance(item, torch.Tensor) or (isinstance(item, Mapping | list) and not _is_entry(item)) for item in items
    )
