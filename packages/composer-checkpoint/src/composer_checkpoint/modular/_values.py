"""What happens to tensors on their way into a state dict: gathering, moving, converting."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from composer_checkpoint._staging import storage_key
from composer_checkpoint._tree import map_tree
from composer_dist.devices import STR_TO_DTYPE

__all__ = ["as_dtype", "cast_state", "gather", "map_tensors", "offload"]


def as_dtype(precision: str | torch.dtype) -> torch.dtype:
    """Return the dtype of a precision's name, with or without `amp_`.

    Raises:
        ValueError: If there is none, or it is not of floating point.
    """
    if isinstance(precision, torch.dtype) and precision.is_floating_point:
        return precision
    name = getattr(precision, "value", precision)  # a Precision has one
    dtype = STR_TO_DTYPE.get(str(name).lower().removeprefix("amp_"))
    if dtype is None:
        raise ValueError(
            f"precision={precision!r} is no format of floating point numbers. Use one of {', '.join(STR_TO_DTYPE)}, or "
            f"a dtype such as torch.float64."
        )
    return dtype


def cast_state(state: Any, dtype: torch.dtype, *, keep_counts: bool = False) -> Any:
    """Convert the floating point tensors of a state. Tensors that are the same memory stay so.

    Args:
        state: Nested dicts and lists.
        dtype: What to convert to.
        keep_counts: Whether a single number is left alone if converting would change it, as an optimizer's count of
            steps must be: bfloat16 cannot count beyond 256, and float16 not beyond 2048.
    """

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        converted = tensor.to(dtype) if tensor.is_floating_point() else tensor
        return tensor if keep_counts and not tensor.dim() and converted.to(tensor.dtype) != tensor else converted

    return map_tensors(state, convert)


def offload(state: Any) -> Any:
    """Move the tensors of a state to the host's memory; of those that are sharded, this rank's shards."""
    return map_tensors(state, lambda tensor: tensor.cpu())


def gather(state: Any, *, keep: bool, cpu_offload: bool) -> Any:
    """Put the shards of each tensor together, one tensor after the other. Every rank must call this.

    Args:
        state: Alike on all ranks.
        keep: Whether this rank wants the result. Others help, and get what they should not use.
        cpu_offload: Whether the whole tensors are moved to the host's memory.
    """

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if not keep:
            return torch.empty(0)  # at once, so that no more than one whole tensor is held
        return tensor.cpu() if cpu_offload else tensor

    return map_tensors(state, whole)


@torch.no_grad()
def map_tensors(state: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change the tensors, each memory once, so that tied weights remain tied."""
    changed: dict[Hashable, torch.Tensor] = {}

    def visit(_: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = _identity(value)
        if key not in changed:
            changed[key] = change(value.detach())
        return changed[key]

    return map_tree(state, visit)


def _identity(tensor: torch.Tensor) -> Hashable:
    if isinstance(tensor, DTensor):
        return tensor.placements, tensor.shape, _identity(tensor.to_local())
    # All empty ones seem to be in one place.
    return (tensor.dtype, storage_key(tensor)) if tensor.numel() else id(tensor)
