"""Whether gradients are finite, which the ranks tell each other by the very reductions that average them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_dist import dist

__all__ = ["ReductionWatch", "watch_reductions"]


class ReductionWatch:
    """Looks at gradients before they are reduced, so that all ranks know alike of those that are not finite.

    A rank whose part of a sum has no finite norm writes NaN over the first number of what each rank is going to get of
    it. All of them find it there, without a message more, and nobody waits for a device. Where all norms are finite the
    sums are, too: no element is larger than the square root of the largest number.

    Args:
        device: Where the gradients are reduced.

    Attributes:
        found: A scalar: 0, or NaN once a gradient of any rank had no finite norm. The same on every rank.
        speaks_of_all: Whether it can be relied on. In float16 a sum of finite gradients may overflow on the one rank
            that gets it, of which the others do not know.
    """

    def __init__(self, device: torch.device) -> None:
        self.found = torch.zeros((), device=device)
        self.speaks_of_all = True

    def begin(self) -> None:
        """Forget what was found, since the gradients are computed anew."""
        self.found.zero_()


def watch_reductions(model: nn.Module, device: torch.device) -> ReductionWatch | None:
    """Let the units of a sharded model look at the gradients that they reduce, from now on.

    Args:
        model: Sharded.
        device: Where its gradients are reduced.

    Returns:
        What finds them, or `None` where a reduction does not speak to all ranks: of weights that only some of them
        share, that are replicated, or of which several ranks hold one tensor together.
    """
    if dist.get_world_size() == 1:
        return None
    groups = {unit: _groups_of(unit) for unit in model.modules() if isinstance(unit, FSDPModule)}
    # Whoever has sharded a model without a plan may have split or replicated tensors that no unit reduces.
    reduced = {each.sharded_param for group in groups.values() for part in group for each in part.fsdp_params}
    sharded = {parameter for parameter in model.parameters() if isinstance(parameter, DTensor)}
    if not sharded <= reduced or not all(map(_is_everybodys, sharded)) or any(len(g) > 1 for g in groups.values()):
        return None
    watch = ReductionWatch(device)
    for unit, group in groups.items():
        for part in group:
            reduce = part._reduce_scatter_comm
            inner = reduce.inner if isinstance(reduce, _WatchedReduction) else reduce
            unit.set_custom_reduce_scatter(_WatchedReduction(inner, watch))  # pyright: ignore[reportArgumentType]  # has all that is asked for
    return watch


def _groups_of(unit: FSDPModule) -> list[Any]:
    """Return what a unit reduces together, one group for each mesh.

    It knows with what it reduces, which may be somebody's own; torch has a public way to set it, and none to ask.
    """
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11, which has one mesh a unit


def _is_everybodys(parameter: DTensor) -> bool:
    """Say whether each rank has one part of a parameter, of which no other rank has anything."""
    mesh = parameter.device_mesh
    return mesh.ndim == 1 and mesh.size() == dist.get_world_size() and parameter.placements[0].is_shard()


class _WatchedReduction:
    """A unit's reduction with a look at what goes in and at what comes out."""

    def __init__(self, inner: Any, watch: ReductionWatch) -> None:
        self.inner = inner
        self._watch = watch

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory to reduce gradients in."""
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **settings: Any) -> Any:
        """Reduce gradients that lie one after the other, those for each rank together."""
        if input_tensor.dtype is torch.float16:
            self._watch.speaks_of_all = False
        has_any = input_tensor.numel() > 0  # weights may be empty
        if has_any:
            firsts = input_tensor.view(group.size(), -1)[:, 0]
            firsts += torch.linalg.vector_norm(input_tensor) * 0  # NaN unless finite
        work = self.inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, **settings)
        if work is not None:
            work.wait()
        if has_any:
            self._watch.found += output_tensor[0] * 0
        return work
