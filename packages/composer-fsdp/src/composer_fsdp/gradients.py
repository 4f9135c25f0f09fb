"""Whether gradients are finite, which the ranks tell each other by the very reductions that average them."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as tdist
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from composer_dist import dist
from composer_dist.ddp import average_gradients

__all__ = ["clip_grad_norm", "ReductionWatch", "watch_reductions", "average_after_backward"]


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


def clip_grad_norm(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    local_meshes: frozenset[Any] = frozenset(),
) -> torch.Tensor:
    """Scale gradients, in place, so that their joint norm is at most `max_norm`. Every rank must call this.

    Args:
        parameters: With gradients that are whole or sharded, over one mesh or several.
        max_norm: The bound.
        norm_type: Which norm; `math.inf` for the largest absolute value.
        local_meshes: The meshes that are only a part of the ranks, where the others have weights of their own.

    Returns:
        The norm before, of all ranks' parts, the same on every rank; it stays on its device.
    """
    groups = _by_mesh([p for p in parameters if p.requires_grad])
    norms: list[torch.Tensor] = []
    for mesh, members in groups.items():
        grads = [p.grad for p in members if p.grad is not None]
        # Where the ranks beyond a mesh add their parts they all must come, whether they have gradients or not.
        if grads or mesh in local_meshes:
            norms.append(_norm_of(mesh, grads or [torch.zeros(())], norm_type, mesh in local_meshes))
    if not norms:
        return torch.tensor(0.0)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    for members in groups.values():
        clip_grads_with_norm_(members, max_norm, total)
    return total


def _by_mesh(parameters: Sequence[torch.Tensor]) -> dict[Any, list[torch.Tensor]]:
    groups: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return groups


def _norm_of(mesh: Any, grads: Sequence[torch.Tensor], norm_type: float, is_local: bool) -> torch.Tensor:
    norm = get_total_norm(grads, norm_type)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if not is_local:
        return norm
    # Each rank of the mesh counts its share of the power, so that together the ranks count every mesh once.
    if math.isinf(norm_type):
        tdist.all_reduce(norm, op=tdist.ReduceOp.MAX)
        return norm
    power = norm.pow(norm_type) / mesh.size()
    tdist.all_reduce(power)
    return power.pow(1 / norm_type)


def average_after_backward(parameters: Sequence[torch.Tensor]) -> None:
    """Let the gradients of parameters be averaged over all ranks at the end of each backward pass, in place.

    Sharded gradients are averaged by then, too. A mean of means and of what was added since is the mean of the sums, so
    that gradients may be accumulated over several backward passes. Every rank has to come through one of the
    parameters in the same passes.

    Args:
        parameters: Whole on every rank, the same and in the same order.
    """
    if not parameters or dist.get_world_size() == 1:
        return
    averaging = _Averaging(parameters)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(averaging)


class _Averaging:
    """Averages once in each backward pass, when all gradients are there."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._pass = -1

    def __call__(self, _: torch.Tensor) -> None:
        number = torch._C._current_graph_task_id()  # of this backward pass; torch has no public name for it
        if number != self._pass:
            self._pass = number
            # Called at the end of the pass, as FSDP2 reduces what is left; torch has no public way to queue it.
            Variable._execution_engine.queue_callback(self._average)  # pyright: ignore[reportAttributeAccessIssue]

    def _average(self) -> None:
        average_gradients(self._parameters)
