"""Peak-memory warm-up with one microbatch of maximal length, and gradient norms and clipping."""

import logging
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from composer_algorithms._loss import find_loss, precision_context
from composer_algorithms.module_surgery import is_dtensor
from composer_dist import dist

if TYPE_CHECKING:
    from composer_events.state import State

_log = logging.getLogger("composer.algorithms.seq_length_warmup")


def run_maximal_batch(state: "State", batch: dict[str, Any]) -> None:
    """Run the first microbatch forward and backward without changing weights, gradients or random state.

    The allocator then holds the memory that the largest microbatch needs. With `state.auto_microbatching`, a
    microbatch that does not fit on some rank is halved on all ranks. Every rank must call this.

    Raises:
        RuntimeError: If a single sample does not fit.
    """
    size = _microbatch_size(state)
    while not _fits(state, batch, size):
        if size == 1:
            raise RuntimeError(
                "a microbatch of one sample of the maximal sequence length does not fit into the device's memory: "
                "lower max_seq_length, or use a smaller model."
            )
        size = max(size // 2, 1)
        _log.info("device_train_microbatch_size is now %d, so that sequences of maximal length fit.", size)
        state.device_train_microbatch_size = size


def _microbatch_size(state: "State") -> int:
    size: Any = state.device_train_microbatch_size
    if size is None:
        size = state.dataloader.batch_size  # an AttributeError names what another dataloader lacks
    if size is None:
        raise RuntimeError(
            "the dataloader has batch_size=None, so the size of a microbatch is not known: set "
            "device_train_microbatch_size."
        )
    return max(int(size), 1)


def _fits(state: "State", batch: dict[str, Any], size: int) -> bool:
    microbatch = {name: value[:size] if isinstance(value, Tensor) else value for name, value in batch.items()}
    has_failed = False
    try:
        _run(state, state.device.batch_to_device(microbatch))
    except torch.OutOfMemoryError:
        if not state.auto_microbatching:
            raise
        has_failed = True
    finally:
        for optimizer in state.optimizers:
            optimizer.zero_grad()
    if not state.auto_microbatching:
        return True
    # All ranks must agree on the size, or their collectives in backward would not pair up.
    failures = torch.tensor([int(has_failed)], dtype=torch.uint8, device=state.device.torch_device)
    dist.all_reduce(failures, reduce_operation="MAX")
    return not failures.item()


def _run(state: "State", microbatch: Any) -> None:
    devices = [state.device.torch_device.index] if state.device.torch_device.type == "cuda" else []
    with ExitStack() as stack:
        # A resumed run skips this pass and must draw the same random numbers as this one.
        stack.enter_context(torch.random.fork_rng(devices=devices))
        # DDP builds its buckets in the first synchronized pass, which must be a training pass.
        stack.enter_context(getattr(state.model, "no_sync", nullcontext)())
        with precision_context(state, state.device.torch_device.type):
            outputs = state.model(microbatch)
            loss = find_loss(state.model)(outputs, microbatch)
        loss.backward()


_ONE = torch.ones((), dtype=torch.float32)  # zero-dim, so it combines with tensors on any device
_IN_CACHE = 1 << 21  # number of elements that fit into the last-level cache of a CPU


def joint_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all tensors as one vector, including shards on other ranks.

    If tensors are sharded, every rank must call this.
    """
    norms = [_whole(get_total_norm(group)) for group in _by_mesh(tensors).values()]
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or an unsharded tensor itself. Both share its memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]  # a DTensor's


def clip_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients so that their joint norm is at most `max_norm`, and return the norm before scaling."""
    if not _can_be_sharded():
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm=max_norm)  # via the module: tests patch it there
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    if not any(is_dtensor(parameter) for parameter in with_gradient):
        return torch.nn.utils.clip_grad_norm_(with_gradient, max_norm=max_norm)
    norm = joint_norm([parameter.grad for parameter in with_gradient if parameter.grad is not None])
    for group in _by_mesh(with_gradient).values():
        clip_grads_with_norm_(group, max_norm, norm)
    return norm


def clip_value(parameters: Iterable[Tensor], threshold: float) -> None:
    """Clamp each element of the gradients to `[-threshold, threshold]`."""
    if not _can_be_sharded():
        if isinstance(parameters, (Iterator, Sequence)):
            parameters = list(parameters)
            if all(parameter.grad is None for parameter in parameters):  # torch fails on an empty list
                return
        torch.nn.utils.clip_grad_value_(parameters, clip_value=threshold)
        return
    whole: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if is_dtensor(parameter.grad):  # elementwise, so each rank can clamp its own shard
            local_part(parameter.grad).clamp_(-threshold, threshold)
        else:
            whole.append(parameter)
    if whole:  # torch fails on an empty list
        torch.nn.utils.clip_grad_value_(whole, clip_value=threshold)


@torch.no_grad()
def clip_to_weights(parameters: Iterable[Tensor], threshold: float, eps: float) -> None:
    """Scale the gradient of each unit so that its norm is at most `threshold` times the norm of the unit's weights.

    A unit is all elements with the same first index. Vectors and scalars are one unit each.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        # One tensor at a time, and large CPU tensors in chunks: a gradient still in the cache when it is scaled does
        # not have to be read from memory twice.
        if gradient.numel() > 2 * _IN_CACHE and gradient.is_cpu and gradient.ndim > 1 and not is_dtensor(gradient):
            num_units = max(1, len(gradient) * _IN_CACHE // gradient.numel())
            for weights, own in zip(parameter.split(num_units), gradient.split(num_units), strict=True):
                own.mul_(unit_coefficients(weights, own, threshold, eps))
        else:
            gradient.mul_(unit_coefficients(parameter, gradient, threshold, eps))


def unit_norms(tensor: Tensor) -> Tensor:
    """Return the norm of each unit, with size 1 in every dim but the first; a single number for a vector."""
    dims = tuple(range(1, tensor.ndim)) or None  # None: over all elements of a vector
    return torch.linalg.vector_norm(tensor, dim=dims, keepdim=dims is not None)


def unit_coefficients(weights: Tensor, gradient: Tensor, threshold: float, eps: float) -> Tensor:
    """Return the factor for each unit of a gradient that bounds its norm by `threshold` times that of the weights."""
    # DTensor norms cover whole units, whichever dim is sharded, but may be partial sums that are not reduced yet.
    norm = unit_norms(weights)
    is_sharded = is_dtensor(norm)
    if eps > 0 or is_sharded:
        norm = norm.clamp(min=eps)
    ratio = norm.mul_(threshold).div_(unit_norms(gradient))
    # At most 1, including 0 / 0, a unit that does not move. DTensor has no fmin, which would do both at once.
    if is_sharded:
        ratio.nan_to_num_(nan=1.0, posinf=1.0).clamp_(max=1.0)
    else:
        torch.fmin(ratio, _ONE, out=ratio)
    return ratio


def _can_be_sharded() -> bool:
    # A DTensor needs a device mesh, which needs the process group.
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _by_mesh(tensors: Iterable[Tensor]) -> dict[Hashable, list[Tensor]]:
    # torch's multi-tensor functions reject tensors of several meshes.
    groups: defaultdict[Hashable, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device_mesh if is_dtensor(tensor) else None].append(tensor)  # pyright: ignore[reportAttributeAccessIssue]  # a DTensor's
    return groups


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if is_dtensor(norm) else norm  # pyright: ignore[reportAttributeAccessIssue]  # a DTensor's
