"""From rank 0, which has whole tensors, to all ranks, of which each needs its part."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as tdist
from torch.distributed.tensor import DTensor

from composer_checkpoint._tree import map_tree
from composer_checkpoint.sharded._ranks import Ranks
from composer_dist.collectives import cpu_group

__all__ = ["Slot", "TensorSender", "fill", "map_slots"]


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a tensor that rank 0 has."""

    index: int
    shape: torch.Size
    dtype: torch.dtype


class TensorSender:
    """Tells all ranks what rank 0 has, and then gives them the tensors, one at a time.

    Every rank must make one, and call `receive` for the same slots in the same order.

    Args:
        state: Nested dicts and lists; rank 0's is told.
    """

    def __init__(self, state: Any) -> None:
        self._ranks = Ranks()
        self._tensors: list[torch.Tensor] = []
        outline = _describe(state, self._tensors) if self._ranks.rank == 0 else None
        self.outline: Any = self._ranks.exchange(lambda: outline, lambda outlines: outlines[:1] * len(outlines))

    def receive(self, slot: Slot, target: torch.Tensor) -> None:
        """Copy this rank's part of a tensor to where it belongs."""
        if self._ranks.world_size == 1:
            fill(target, self._tensors[slot.index])
            return
        # As the target's device if ranks can talk there, which is many times faster than by way of the host.
        direct = f"{target.device.type}:" in tdist.get_backend_config()
        device = target.device if direct else torch.device("cpu")
        if self._ranks.rank == 0:
            whole = self._tensors[slot.index].to(device).contiguous()
        else:
            whole = torch.empty(slot.shape, dtype=slot.dtype, device=device)
        tdist.broadcast(whole, src=0, group=None if direct else cpu_group(None))
        fill(target, whole)


def _describe(state: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the state with a slot for each tensor, and put the tensors into the list."""

    def replace(_: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value.detach())
        return Slot(len(tensors) - 1, value.shape, value.dtype)

    return map_tree(state, replace)


def map_slots(outline: Any, change: Callable[[str, Slot], Any]) -> Any:
    """Return the outline with each slot replaced; in the same order on all ranks."""
    return map_tree(outline, lambda name, value: change(name, value) if isinstance(value, Slot) else value)


@torch.no_grad()
def fill(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor into a tensor of its shape, or into this rank's part of one."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    local = target.to_local()
    # The method through which torch's own checkpoints ask a tensor which box of the whole it holds.
    for chunk in target.__create_chunk_list__() if local.numel() else ():
        part = whole
        for dim, (start, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            part = part.narrow(dim, start, length)
        local.copy_(part)
