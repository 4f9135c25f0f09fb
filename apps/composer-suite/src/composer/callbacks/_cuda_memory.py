"""What CUDA's allocator did: the one place that reaches for PyTorch's private functions for it.

They are what PyTorch's own guide to memory snapshots uses; there are no public ones (2.15).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["Snapshot", "attach_out_of_memory_observer", "record_history", "stop_history", "take_snapshot"]

Snapshot = Mapping[str, Any]
"""The segments that the allocator holds, with their blocks, and for each device what it did."""


def record_history(max_entries: int) -> None:
    """Begin to remember the last allocations and frees, with the lines of Python that made them."""
    torch.cuda.memory._record_memory_history("all", max_entries=max_entries)


def stop_history() -> None:
    """Remember no more, and forget."""
    torch.cuda.memory._record_memory_history(None)


def take_snapshot() -> Snapshot:
    """Return what is remembered."""
    return torch.cuda.memory._snapshot()


def attach_out_of_memory_observer(observer: Callable[[int, int, int, int], None]) -> None:
    """Have a function called when memory has run out, before the error is raised. It stays as long as the process.

    Args:
        observer: Gets the device, the bytes asked for, the bytes of the device and those free.
    """
    torch._C._cuda_attach_out_of_memory_observer(observer)  # pyright: ignore[reportAttributeAccessIssue]  # not in its stubs
