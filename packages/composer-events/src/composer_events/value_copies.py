"""Logged values as they are now, whatever becomes of the tensors and containers that hold them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from composer_events.log_values import is_tensor

__all__ = ["UNCHANGING", "as_of_now", "detached_copy", "kept_metrics", "map_values", "restored"]

UNCHANGING: Final = frozenset({bool, int, float, str, type(None)})
"""Types of values that need no copy."""


def detached_copy(value: Any) -> Any:
    """Return a copy of a value; that of a tensor stays on its device and keeps no graph alive.

    Args:
        value: A number, tensor, array, text, or a container of these. Anything else that cannot be copied, such as an
            open file, is returned as it is.
    """
    if type(value) in UNCHANGING:
        return value
    if is_tensor(value):
        return value.detach().clone() if value.requires_grad else value.clone()
    if isinstance(value, dict) or type(value) in (list, tuple):
        return map_values(detached_copy, value)
    try:
        return copy.deepcopy(value)
    except Exception:  # whatever somebody else's object raises
        return value


def kept_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as they are now; whatever lies on an accelerator stays there, and nobody waits for it.

    Args:
        metrics: By name.

    Returns:
        Copies by name. Read each through `restored`.

    Example:
        >>> losses = [0.5, 0.25]
        >>> kept = kept_metrics({"losses": losses})
        >>> losses.clear()
        >>> restored(kept["losses"])
        [0.5, 0.25]
    """
    return as_of_now(metrics)[1]


def as_of_now(metrics: Mapping[str, Any], copies: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return metrics that keep no forward pass in memory, and copies of them as they are now.

    Args:
        metrics: By name.
        copies: Whether those are wanted, which are as of `kept_metrics`. Otherwise the same dict is returned twice.
    """
    torch: Any = sys.modules.get("torch")
    tensor = None if torch is None else torch.Tensor
    kept: dict[str, Any] = {}
    copied: dict[str, Any] = {} if copies else kept
    for name, value in metrics.items():
        if type(value) in UNCHANGING:
            kept[name] = copied[name] = value
        elif type(value) is tensor and value.is_cpu and value.ndim == 0 and not value.requires_grad:
            kept[name] = value
            if copies:  # reading the number takes a third of the time of copying the tensor
                dtype = value.dtype
                copied[name] = _Scalar((value.item(), dtype)) if dtype.is_floating_point else detached_copy(value)
        else:
            kept[name] = map_values(_without_graph, value)
            if copies:
                copied[name] = detached_copy(kept[name])
    return kept, copied


def _without_graph(value: Any) -> Any:
    return value.detach() if is_tensor(value) and value.requires_grad else value


def restored(value: Any) -> Any:
    """Return what a value of `kept_metrics` was made from.

    Args:
        value: The value.
    """
    if type(value) is not _Scalar:
        return value
    number, dtype = value
    return sys.modules["torch"].tensor(number, dtype=dtype, device="cpu")


def map_values(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a container with its elements changed, or what is none changed itself.

    Args:
        change: What is done to each element.
        value: A dict, list or tuple, nested or not, or anything else.
    """
    if isinstance(value, dict):
        return {key: map_values(change, element) for key, element in cast("dict[Any, Any]", value).items()}
    if type(value) in (list, tuple):
        return type(value)(map_values(change, element) for element in value)
    return change(value)


class _Scalar(tuple[Any, Any]):
    """The number and the dtype of a tensor without axes."""

    __slots__ = ()
