"""The three types of a state dict: whole tensors on rank 0, shards, and what each rank has by itself."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from composer_checkpoint.modular._spreading import fill
from composer_checkpoint.modular._values import gather, map_tensors
from composer_dist.env import get_global_rank

__all__ = ["check_type", "of_type", "own_part", "room_for"]

_TYPES = ("full", "sharded", "local")


def check_type(state_dict_type: object) -> None:
    """Refuse what is none of the three types.

    Raises:
        ValueError: With the types.
    """
    if state_dict_type not in _TYPES:
        raise ValueError(
            f"state_dict_type={state_dict_type!r} is none that there is. Use 'full' for whole tensors on rank 0, "
            f"'sharded' for DTensors, or 'local' for the tensors of each rank."
        )


def of_type(state: dict[str, Any], state_dict_type: str, *, rank0_only: bool = True) -> dict[str, Any]:
    """Return a state that is of `DTensor`s as another type has it. Every rank must call this for `'full'`.

    Args:
        state: Nested dicts and lists, alike on all ranks.
        state_dict_type: Only whole tensors are moved to the host.
        rank0_only: Whether other ranks get nothing of what is whole.
    """
    if state_dict_type == "sharded":
        return state
    if state_dict_type == "local":
        return map_tensors(state, _local)
    keep = not rank0_only or get_global_rank() == 0
    gathered = gather(state, keep=keep, cpu_offload=True)
    return gathered if keep else {}


@torch.no_grad()
def own_part(name: str, own: object, value: torch.Tensor) -> torch.Tensor:
    """Return a rank's tensor spread as the one is that it shall replace.

    Args:
        name: For the error.
        own: What it replaces.
        value: This rank's part, or the whole; a `DTensor` stays as it is.

    Raises:
        ValueError: If it is neither.
    """
    if not isinstance(own, DTensor) or isinstance(value, DTensor):
        return value
    target = room_for(own, value.dtype)
    local = target.to_local()
    if value.shape == local.shape:
        local.copy_(value)
    elif value.shape == own.shape:
        fill(target, value)
    else:
        raise ValueError(
            f"{name} has the shape {tuple(value.shape)}, and rank {get_global_rank()} holds {tuple(local.shape)} of "
            f"{tuple(own.shape)}. What is of state_dict_type='local' fits as many ranks as it was made on, with the "
            f"model sharded alike; save with 'full' or 'sharded' for others."
        )
    return target


def room_for(own: torch.Tensor, dtype: torch.dtype) -> Any:
    """Return a tensor with any values, spread as another one is, on a device that has memory."""
    on_host = own.device_mesh.device_type if isinstance(own, DTensor) else "cpu"
    return torch.empty_like(own, dtype=dtype, device=on_host if own.is_meta else None, requires_grad=False)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
