"""Logged values as they are now, whatever becomes of the tensors and containers that hold them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from composer_events.log_values import is_tensor

__all__ = ["UNCHANGING", "detached_copy", "kept_metrics", "map_values", "restored", "without_graphs"]

UNCHANGING: Final = frozenset({bool, int, float, str, type(None)})
"""Types of values that need no copy."""


def detached_copy(value: Any) -> Any:
    """Return a copy of a value; that of a tensor stays on its device and keeps no graph alive.

    Args:
        value: A number, tensor, array, text, or a container of these.
    """
    if type(value) in UNCHANGING:
        return value
    if is_tensor(value):
        return value.detach().clone() if value.requires_grad else value.clone()
    if isinstance(value, dict) or type(value) in (list, tuple):
        return map_values(detached_copy, value)
    return copy.deepcopy(value)


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
    torch: Any = sys.modules.get("torch")
    kept: dict[str, Any] = {}
    for name, value in metrics.items():
        # Reading the number of a tensor that has one, and is at hand, takes a third of the time of copying the tensor.
        is_number = torch is not None and type(value) is torch.Tensor and value.is_cpu and value.ndim == 0
        if is_number and not value.is_quantized:
            kept[name] = _Scalar((value.item(), value.dtype))
        else:
            kept[name] = detached_copy(value)
    return kept


def without_graphs(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same metrics, of which none keeps the activations of a forward pass in memory.

    Args:
        metrics: By name.
    """
    return {name: map_values(_without_graph, value) for name, value in metrics.items()}


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
