"""Numbers that can be had without waiting for a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["numbers_at_hand"]


def numbers_at_hand(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name, with tensors of one element as numbers where they are on the CPU.

    Loggers can keep and write these as they are. What is on an accelerator stays there.

    >>> import torch
    >>> numbers_at_hand({"norm": torch.tensor(1.5), "lr": 0.1})
    {'norm': 1.5, 'lr': 0.1}
    """
    at_hand = {name: value for name, value in values.items() if _is_at_hand(value)}
    if len({(value.dtype, value.shape) for value in at_hand.values()}) == 1:
        numbers = torch.stack(list(at_hand.values())).flatten().tolist()  # sooner than one after the other
    else:
        numbers = [value.item() for value in at_hand.values()]
    return {**values, **dict(zip(at_hand, numbers, strict=True))}


def _is_at_hand(value: Any) -> bool:
    return type(value) is Tensor and value.is_cpu and value.numel() == 1
