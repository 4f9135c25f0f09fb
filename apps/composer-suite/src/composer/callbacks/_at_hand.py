"""Numbers that can be had without waiting for a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["numbers_at_hand"]


def numbers_at_hand(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name, with tensors of one element as numbers where they are on the CPU.

    Loggers can keep and write these as they are. What is on an accelerator stays there.

    >>> import torch
    >>> numbers_at_hand({"norm": torch.tensor(1.5), "lr": 0.1})
    {'norm': 1.5, 'lr': 0.1}
    """
    return {name: value.item() if _is_at_hand(value) else value for name, value in values.items()}


def _is_at_hand(value: Any) -> bool:
    return type(value) is Tensor and value.is_cpu and value.numel() == 1
