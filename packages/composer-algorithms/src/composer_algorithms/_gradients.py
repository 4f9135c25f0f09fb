"""Joint norms and bounds of gradients, which may be whole tensors or sharded over meshes of devices."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from composer_algorithms._wrapping import is_dtensor


def joint_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all tensors as one vector, shards on other ranks included.

    Where tensors are sharded, every rank must call it.
    """
    norms = [_whole(get_total_norm(group)) for group in _by_mesh(tensors).values()]
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the tensor itself if it is whole. Both share their memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]  # a DTensor's


def clip_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients so that their joint norm is at most `max_norm`, and return the norm before."""
    if not _can_be_sharded():
        return clip_grad_norm_(parameters, max_norm=max_norm)
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    if not any(is_dtensor(parameter) for parameter in with_gradient):
        return clip_grad_norm_(with_gradient, max_norm=max_norm)
    norm = joint_norm([parameter.grad for parameter in with_gradient if parameter.grad is not None])
    for group in _by_mesh(with_gradient).values():
        clip_grads_with_norm_(group, max_norm, norm)
    return norm


def clip_value(parameters: Iterable[Tensor], threshold: float) -> None:
    """Clamp each element of the gradients to `[-threshold, threshold]`."""
    if not _can_be_sharded():
        clip_grad_value_(parameters, clip_value=threshold)
        return
    whole: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if is_dtensor(parameter.grad):  # element by element, so each rank can do its own part
            local_part(parameter.grad).clamp_(-threshold, threshold)
        else:
            whole.append(parameter)
    clip_grad_value_(whole, clip_value=threshold)


@torch.no_grad()
def clip_to_weights(parameters: Iterable[Tensor], threshold: float, eps: float) -> None:
    """Scale the gradient of each unit so that its norm is at most `threshold` times that of the unit's weights.

    A unit is a row of the weights: all that has the same first index. Vectors and scalars are one unit each.
    """
    groups: defaultdict[Hashable, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if is_dtensor(parameter):
            _clip_sharded(parameter, parameter.grad, threshold, eps)
        else:
            groups[parameter.device, parameter.dtype].append((parameter.detach(), parameter.grad))
    for pairs in groups.values():
        gradients = [gradient for _, gradient in pairs]
        weight_norms = [_unit_norm(weight) for weight, _ in pairs]
        gradient_norms = [_unit_norm(gradient) for gradient in gradients]
        # The norms are small: side by side they need a handful of kernels, whatever the number of parameters.
        coefficients = _coefficient(_side_by_side(weight_norms), _side_by_side(gradient_norms), threshold, eps)
        parts = coefficients.split([norm.numel() for norm in gradient_norms])
        factors = [part.view_as(norm) for part, norm in zip(parts, gradient_norms, strict=True)]
        torch._foreach_mul_(gradients, factors)  # pyright: ignore[reportPrivateImportUsage]  # it has no public name


def _clip_sharded(weight: Tensor, gradient: Tensor, threshold: float, eps: float) -> None:
    # As DTensors the norms are those of whole units, whichever dim is sharded.
    coefficient = _coefficient(_unit_norm(weight.detach()), _unit_norm(gradient), threshold, eps)
    gradient.mul_(coefficient)


def _unit_norm(tensor: Tensor) -> Tensor:
    if tensor.ndim <= 1:
        return torch.linalg.vector_norm(tensor)
    return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True)


def _coefficient(weight_norm: Tensor, gradient_norm: Tensor, threshold: float, eps: float) -> Tensor:
    ratio = weight_norm.clamp(min=eps).mul_(threshold).div_(gradient_norm)
    return ratio.nan_to_num_(nan=1.0, posinf=1.0).clamp_(max=1.0)  # 0 / 0 is a unit that does not move


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _can_be_sharded() -> bool:
    # A DTensor needs a mesh of devices, and that needs the process group.
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _by_mesh(tensors: Iterable[Tensor]) -> dict[Hashable, list[Tensor]]:
    # torch's functions for many tensors refuse to take tensors of several meshes at once.
    groups: defaultdict[Hashable, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device_mesh if is_dtensor(tensor) else None].append(tensor)  # pyright: ignore[reportAttributeAccessIssue]  # a DTensor's
    return groups


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if is_dtensor(norm) else norm  # pyright: ignore[reportAttributeAccessIssue]  # a DTensor's
