"""Which of how many processes this is, as far as the standard variables and a running torch.distributed tell."""

from __future__ import annotations

import os
import sys
from typing import Any, TypeVar

__all__ = ["any_rank", "gather", "get_global_rank", "get_local_world_size", "get_world_size"]

T = TypeVar("T")


def get_global_rank() -> int:
    """Answer this process's number among all, 0 when it is alone."""
    distributed = _process_group()
    return int(distributed.get_rank()) if distributed is not None else _from_environment("RANK", 0)


def get_world_size() -> int:
    """Answer how many processes train together."""
    distributed = _process_group()
    return int(distributed.get_world_size()) if distributed is not None else _from_environment("WORLD_SIZE", 1)


def get_local_world_size() -> int:
    """Answer how many of them run on this machine, as far as the launcher says."""
    return _from_environment("LOCAL_WORLD_SIZE", 1)


def any_rank(flag: bool) -> bool:
    """Answer whether the flag is up on any rank. Every rank must call this."""
    return any(gather(flag))


def gather(value: T) -> list[T]:
    """Return what every rank has, in their order. Every rank must call this."""
    distributed = _process_group()
    if distributed is None or distributed.get_world_size() == 1:
        return [value]
    # Of the collectives only this one chooses a device that the backend can use by itself.
    values: list[Any] = [None] * int(distributed.get_world_size())
    distributed.all_gather_object(values, value)
    return values


def _process_group() -> Any:
    # A process that has not imported torch.distributed cannot have started it.
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def _from_environment(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    if not value:
        return default
    try:
        return int(value)
    except ValueError:
        raise ValueError(
            f"The environment variable {name}={value!r} is not a whole number. The launcher sets it for each process; "
            f"unset it to train in one process."
        ) from None
