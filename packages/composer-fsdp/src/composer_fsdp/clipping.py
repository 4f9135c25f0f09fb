"""Norms of gradients whose parts lie on ranks that are arranged in different ways."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as tdist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

__all__ = ["clip_grad_norm"]


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
