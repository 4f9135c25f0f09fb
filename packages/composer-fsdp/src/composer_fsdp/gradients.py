"""Gradient clipping, averaging, and detection of non-finite gradients without extra communication."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
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


class ReductionWatch:
    """Detector of non-finite gradients whose result is the same on every rank.

    A rank whose gradients have a non-finite norm writes NaN to the first element of every rank's part before the
    reduce-scatter, which carries it to all ranks without another collective or a device synchronization. If all norms
    are finite, so are the sums: no element exceeds the square root of the largest number.

    Attributes:
        found: A scalar tensor: 0, or NaN once any rank had a gradient without a finite norm. The same on every rank.
        speaks_of_all: Whether `found` is reliable. In float16 a sum of finite gradients may overflow on the one rank
            that receives it, unnoticed by the others.
    """

    def __init__(self, device: torch.device) -> None:
        self.found = torch.zeros((), device=device)
        self.speaks_of_all = True

    def begin(self) -> None:
        """Reset the result before gradients are computed again."""
        self.found.zero_()


def watch_reductions(model: nn.Module, device: torch.device) -> ReductionWatch | None:
    """Install a detector of non-finite gradients in the units of a sharded model.

    Returns:
        The detector, or `None` if a reduction does not reach all ranks: with weights that are sharded over some ranks
        only, replicated, or split by tensor parallelism, or on a single rank.
    """
    if dist.get_world_size() == 1:
        return None
    groups = {unit: _groups_of(unit) for unit in model.modules() if isinstance(unit, FSDPModule)}
    # In a model that was sharded without a plan, there may be DTensors that no unit reduces.
    reduced = {each.sharded_param for group in groups.values() for part in group for each in part.fsdp_params}
    sharded = {parameter for parameter in model.parameters() if isinstance(parameter, DTensor)}
    if not sharded <= reduced or not all(map(_is_everybodys, sharded)) or any(len(g) > 1 for g in groups.values()):
        return None
    watch = ReductionWatch(device)
    for unit, group in groups.items():
        for part in group:
            reduce = part._reduce_scatter_comm
            # A second detector replaces the first one.
            inner = reduce.inner if isinstance(reduce, _WatchedReduction) else reduce
            unit.set_custom_reduce_scatter(_WatchedReduction(inner, watch))  # pyright: ignore[reportArgumentType]  # has all required methods
    return watch


def _groups_of(unit: FSDPModule) -> list[Any]:
    """Return the parameter groups of a unit, one per mesh.

    They hold the current reduce-scatter, possibly a custom one, which PyTorch has a public setter but no getter for.
    """
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11: one mesh per unit


def _is_everybodys(parameter: DTensor) -> bool:
    mesh = parameter.device_mesh  # sharded over all ranks, without replicas
    return mesh.ndim == 1 and mesh.size() == dist.get_world_size() and parameter.placements[0].is_shard()


class _WatchedReduction:
    """Reduce-scatter that checks its input and output for non-finite values."""

    def __init__(self, inner: Any, watch: ReductionWatch) -> None:
        self.inner = inner
        self._watch = watch

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **settings: Any) -> Any:
        if input_tensor.dtype is torch.float16:
            self._watch.speaks_of_all = False
        has_any = input_tensor.numel() > 0  # parameters may be empty
        if has_any:
            firsts = input_tensor.view(group.size(), -1)[:, 0]
            firsts += torch.linalg.vector_norm(input_tensor) * 0  # NaN unless finite
        work = self.inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, **settings)
        # The output is valid only after an asynchronous reduction is done.
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
    """Scale gradients in place so that their total norm is at most `max_norm`. Every rank must call this."""
    groups: dict[Any, list[torch.Tensor]] = {}  # by mesh, None for whole ones
    for each in parameters:
        if each.requires_grad:
            groups.setdefault(each.device_mesh if isinstance(each, DTensor) else None, []).append(each)
    norms: list[torch.Tensor] = []
    for mesh, members in groups.items():
        grads = [p.grad for p in members if p.grad is not None]
        # The norm of a local mesh is all-reduced over all ranks, so that every rank must take part, gradients or not.
        if grads or mesh in local_meshes:
            zero = torch.zeros((), device=members[0].device)  # on another device, this rank would use another backend
            norms.append(_norm_of(mesh, grads or [zero], norm_type, mesh in local_meshes))
    if not norms:
        return torch.tensor(0.0)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    for members in groups.values():
        clip_grads_with_norm_(members, max_norm, total)
    return total


def _norm_of(mesh: Any, grads: Sequence[torch.Tensor], norm_type: float, is_local: bool) -> torch.Tensor:
    norm = get_total_norm(grads, norm_type)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if not is_local:
        return norm
    # Every rank of the mesh has the same norm, so that dividing by its size counts each mesh once in the sum.
    if math.isinf(norm_type):
        tdist.all_reduce(norm, op=tdist.ReduceOp.MAX)
        return norm
    power = norm.pow(norm_type) / mesh.size()
    tdist.all_reduce(power)
    return power.pow(1 / norm_type)


def average_after_backward(parameters: Sequence[torch.Tensor]) -> None:
    """Register hooks that average gradients over all ranks in place at the end of each backward pass.

    Sharded gradients are averaged by then, too. Averaging an accumulated gradient again is correct, since averaging is
    linear, so gradient accumulation works. In each backward pass, either every rank or no rank must compute a gradient
    of these parameters.
    """
    if not parameters or dist.get_world_size() == 1:
        return
    last_pass = -1

    def average_once(_: torch.Tensor) -> None:
        nonlocal last_pass
        number = torch._C._current_graph_task_id()  # identifies this backward pass; PyTorch has no public name for it
        if number != last_pass:
            last_pass = number
            # Runs at the end of the pass, as FSDP2's final reductions do. PyTorch has no public way to queue it.
            average = partial(average_gradients, parameters)
            Variable._execution_engine.queue_callback(average)  # pyright: ignore[reportAttributeAccessIssue]

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(average_once)
