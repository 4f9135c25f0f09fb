"""Logged values as they are now, whatever becomes of the tensors and containers that hold them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch

__all__ = ["detached_copy", "kept_metrics", "map_values", "restored"]

_UNCHANGING = frozenset({bool, int, float, str, type(None)})


def detached_copy(value: Any) -> Any:
    """Return a copy of a value; that of a tensor stays on its device and keeps no graph alive.

    Args:
        value: A number, tensor, array, text, or a container of these.
    """
    if type(value) in _UNCHANGING:
        return value
    if isinstance(value, torch.Tensor):
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

    >>> loss = torch.tensor(0.5)
    >>> kept = kept_metrics({"loss": loss})
    >>> loss += 1
    >>> restored(kept["loss"])
    tensor(0.5000)
    """
    return {name: _kept(value) for name, value in metrics.items()}


def restored(value: Any) -> Any:
    """Return what a value of `kept_metrics` was made from.

    Args:
        value: The value.
    """
    return torch.tensor(value.number, dtype=value.dtype, device="cpu") if type(value) is _Scalar else value


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


class _Scalar(NamedTuple):
    """A tensor of one number: reading the number takes a third of the time of copying the tensor."""

    number: float | int | bool | complex
    dtype: torch.dtype


def _kept(value: Any) -> Any:
    if type(value) is torch.Tensor and value.is_cpu and value.ndim == 0 and not value.is_quantized:
        return _Scalar(value.item(), value.dtype)
    return detached_copy(value)
