"""Gradient clipping: bound the gradients by their norm, by value, or by the norms of the weights they belong to."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from composer_algorithms._arguments import check_choice, check_interval, warn_deprecated
from composer_algorithms._method import Method
from composer_algorithms.metadata import METHODS
from composer_algorithms.module_surgery import has_flat_parameters, is_dtensor
from composer_events import Event, Logger, State

__all__ = ["AGC", "GradientClipping", "apply_agc", "apply_gradient_clipping", "METADATA"]

METADATA = METHODS["gradient_clipping"]

_TYPES = ("norm", "value", "adaptive")

ClippingType = Literal["norm", "value", "adaptive"]


def apply_gradient_clipping(
    model: nn.Module | Iterable[Tensor],
    clipping_type: ClippingType | str,
    clipping_threshold: float,
    fsdp_enabled: bool = False,
    *,
    eps: float = 0.0,
) -> None:
    """Clip the gradients of a model, in place.

    - `'norm'`: all gradients are scaled by one factor, so that their joint Euclidean norm is at most the threshold.
    - `'value'`: each element is clamped to `[-threshold, threshold]`.
    - `'adaptive'`: the gradient of each unit (a row of the weights; a vector is one unit) is scaled so that its norm is
      at most `threshold` times the norm of the unit's weights.

    Gradients may be sharded by `fully_shard` or tensor parallelism; norms are then those of the whole gradient, and
    every rank must call this. Parameters without a gradient are skipped.

    Args:
        model: The model, or its parameters.
        clipping_type: `'norm'`, `'value'` or `'adaptive'`.
        clipping_threshold: Threshold, 0 or more.
        fsdp_enabled: Whether FSDP1 (`FullyShardedDataParallel`) shards the model.
        eps: Minimum assumed for the norms of weights with `'adaptive'`. With 0, weights that are all zero never move;
            the paper uses 1e-3.

    Raises:
        ValueError: If the type is unknown, the threshold is negative or not a number, or the type is `'adaptive'` for a
            model sharded by FSDP1.

    Example:
        >>> import torch
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> apply_gradient_clipping([weight], "norm", 1.0)
        >>> weight.grad
        tensor([0.6000, 0.8000])

    Reference:
        Norm: Pascanu et al., 2012, arXiv:1211.5063. Adaptive: Brock et al., "High-Performance Large-Scale Image
        Recognition Without Normalization", ICML 2021, arXiv:2102.06171, eq. (3). The paper does not clip the final
        linear layer; here all parameters are clipped.
    """
    check_choice(_TYPES, clipping_type=clipping_type)
    check_interval("[0, inf)", clipping_threshold=clipping_threshold, eps=eps)
    parameters: Iterable[Tensor]
    if callable(method := getattr(model, "parameters", None)):
        parameters = cast("Iterable[Tensor]", method())
    else:
        parameters = [model] if isinstance(model, Tensor) else cast("Iterable[Tensor]", model)
    if clipping_type == "value":
        _clip_value(parameters, clipping_threshold)  # elementwise, so sharding does not matter
    elif fsdp_enabled:
        if clipping_type == "adaptive":
            raise ValueError(
                "clipping_type='adaptive' needs whole units of the weights, and FSDP1 keeps slices of flattened "
                "tensors: shard the model with FSDP2 (fully_shard), or clip by 'norm' or 'value'."
            )
        from torch.distributed.fsdp import FullyShardedDataParallel  # already loaded, since the model is one

        for module in cast("nn.Module", model).modules():
            # Each root clips everything below it.
            if isinstance(module, FullyShardedDataParallel) and module.check_is_root():
                module.clip_grad_norm_(max_norm=clipping_threshold)
    elif clipping_type == "norm":
        _clip_norm(parameters, clipping_threshold)
    else:
        # Pass `eps` only if it is set: tests of users replace this function by one with Composer's arguments.
        _apply_agc(parameters, clipping_threshold=clipping_threshold, **({"eps": eps} if eps else {}))


# Names and arguments of the next three functions are Composer's: users' tests call the last two, and patch the first.
@torch.no_grad()
def _apply_agc(parameters: Iterable[Tensor], clipping_threshold: float, eps: float = 0.0) -> None:
    """Scale the gradient of each unit so that its norm is at most the threshold times the norm of the unit's weights.

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
                own.mul_(_get_clipped_gradient_coeff(weights, own, clipping_threshold, eps))
        else:
            gradient.mul_(_get_clipped_gradient_coeff(parameter, gradient, clipping_threshold, eps))


@torch.no_grad()
def _get_clipped_gradient_coeff(
    weights: Tensor, grad: Tensor, clipping_threshold: float = 0.01, eps: float = 0.0
) -> Tensor:
    """Return for each unit the factor that limits the gradient's norm to the threshold times that of the weights."""
    # The norm of a DTensor covers whole units, whichever dim is sharded, but may be a partial result. `clamp` reduces
    # it, and the in-place operations below reject partial results.
    norm = _unitwise_norm(weights)
    is_sharded = is_dtensor(norm)
    if eps > 0 or is_sharded:
        norm = norm.clamp(min=eps)
    ratio = norm.mul_(clipping_threshold).div_(_unitwise_norm(grad))
    # At most 1, including 0 / 0, a unit that does not move. DTensor has no fmin, which would do both at once.
    if is_sharded:
        ratio.nan_to_num_(nan=1.0, posinf=1.0).clamp_(max=1.0)
    else:
        torch.fmin(ratio, _ONE, out=ratio)
    return ratio


@torch.no_grad()
def _unitwise_norm(tensor: Tensor) -> Tensor:
    """Return the norm of each unit, with size 1 in every dim but the first; a single number for a vector."""
    dims = tuple(range(1, tensor.ndim)) or None  # None: over all elements of a vector
    return torch.linalg.vector_norm(tensor, dim=dims, keepdim=dims is not None)


def apply_agc(model: nn.Module | Iterable[Tensor], clipping_threshold: float = 0.01) -> None:
    """Clip adaptively, under the name of this method in Composer 0.7.

    Args:
        model: The model, or its parameters.
        clipping_threshold: As for `apply_gradient_clipping(model, "adaptive", clipping_threshold)`.
    """
    warn_deprecated(
        f"apply_agc is now a kind of gradient clipping: write apply_gradient_clipping(model, 'adaptive', "
        f"{clipping_threshold!r}).",
        stacklevel=2,
    )
    apply_gradient_clipping(model, "adaptive", clipping_threshold)


class GradientClipping(Method):
    """Clip the gradients of each step.

    On `AFTER_TRAIN_BATCH`, when the gradients of all microbatches are complete and unscaled, it calls
    `apply_gradient_clipping`. If an optimizer evaluates a batch twice, as SAM does, it clips both times. Under
    DeepSpeed it does nothing: the engine clips inside its step, as configured.

    Attributes:
        clip_grad_norm: Implementation of `'norm'`. A loop that distributes its model in a custom way assigns its own,
            `strategy.clip_grad_norm`: a function of the parameters and the threshold.

    Args:
        clipping_type: `'norm'`, `'value'` or `'adaptive'`.
        clipping_threshold: Threshold, 0 or more.
        eps: See `apply_gradient_clipping`.

    Raises:
        ValueError: If the type is unknown, or the threshold is negative or not a number.

    Example:
        >>> GradientClipping("norm", 1.0)
        GradientClipping(clipping_type='norm', clipping_threshold=1.0)

    Reference:
        See `apply_gradient_clipping`.
    """

    schedulable = ("clipping_threshold",)
    acts_on = frozenset({Event.INIT, Event.AFTER_TRAIN_BATCH})

    def __init__(self, clipping_type: ClippingType | str, clipping_threshold: float, *, eps: float = 0.0) -> None:
        check_choice(_TYPES, clipping_type=clipping_type)
        check_interval("[0, inf)", clipping_threshold=clipping_threshold, eps=eps)
        self.clipping_type = clipping_type
        self.clipping_threshold = clipping_threshold
        self.eps = eps
        self.clip_grad_norm: Callable[[Iterable[Tensor], float], Any] | None = None

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Clip the gradients; on INIT, reject settings that DeepSpeed does not support."""
        if state.deepspeed_enabled:
            self.schedulable = ()  # DeepSpeed has read the threshold
            if self.clipping_type != "norm" or self.clipping_threshold <= 0:
                error = NotImplementedError if self.clipping_type != "norm" else ValueError
                raise error(
                    f"{self!r} cannot be used under DeepSpeed, which clips by 'norm' only, and takes a threshold of 0 "
                    f"for no clipping: use 'norm' with a clipping_threshold above 0, or train without DeepSpeed."
                )
        elif event != Event.AFTER_TRAIN_BATCH:
            return
        elif self.clipping_type == "norm" and self.clip_grad_norm is not None:
            self.clip_grad_norm(state.model.parameters(), self.clipping_threshold)
        else:
            apply_gradient_clipping(
                state.model,
                self.clipping_type,
                self.clipping_threshold,
                fsdp_enabled=has_flat_parameters(state.model),
                eps=self.eps,
            )

    def __repr__(self) -> str:
        return super().__repr__() if self.eps else super().__repr__().replace(f", eps={self.eps!r}", "")


def AGC(clipping_threshold: float = 0.01) -> GradientClipping:  # the name of the class in Composer 0.7
    """Create the `GradientClipping` that was a class of its own in Composer 0.7.

    Args:
        clipping_threshold: As for `GradientClipping("adaptive", clipping_threshold)`.
    """
    warn_deprecated(
        f"AGC is now a kind of gradient clipping: write GradientClipping('adaptive', {clipping_threshold!r}).",
        stacklevel=2,
    )
    return GradientClipping("adaptive", clipping_threshold)


_ONE = torch.ones((), dtype=torch.float32)  # zero-dim, so it combines with tensors on any device
_IN_CACHE = 1 << 21  # number of elements that fit into the last-level cache of a CPU


def joint_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all tensors as one vector, including shards on other ranks.

    If tensors are sharded, every rank must call this.
    """
    norms: list[Any] = [get_total_norm(group) for group in _by_mesh(tensors).values()]
    norms = [norm.full_tensor() if is_dtensor(norm) else norm for norm in norms]
    # The norm of the groups' norms is the norm of all elements.
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or an unsharded tensor itself. Both share its memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]  # a DTensor's


def _clip_norm(parameters: Iterable[Tensor], max_norm: float) -> None:
    """Scale the gradients so that their joint norm is at most `max_norm`."""
    if _can_be_sharded():
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        if any(map(is_dtensor, parameters)):
            norm = joint_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
            for group in _by_mesh(parameters).values():
                clip_grads_with_norm_(group, max_norm, norm)
            return
    torch.nn.utils.clip_grad_norm_(parameters, max_norm=max_norm)  # via the module: tests patch it there


def _clip_value(parameters: Iterable[Tensor], threshold: float) -> None:
    """Clamp each element of the gradients to `[-threshold, threshold]`."""
    if isinstance(parameters, (Iterator, Sequence)):  # not what stands for parameters in tests of users
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        if _can_be_sharded():
            whole: list[Tensor] = []
            for parameter in parameters:
                if parameter.grad is not None and is_dtensor(parameter.grad):
                    # Elementwise, so each rank clamps its own shard.
                    local_part(parameter.grad).clamp_(-threshold, threshold)
                else:
                    whole.append(parameter)
            parameters = whole
        if not parameters:  # torch fails on an empty list
            return
    torch.nn.utils.clip_grad_value_(parameters, clip_value=threshold)


def _can_be_sharded() -> bool:
    # A DTensor needs a device mesh, which needs the process group.
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _by_mesh(tensors: Iterable[Tensor]) -> dict[Hashable, list[Tensor]]:
    # torch's multi-tensor functions reject tensors of several meshes.
    groups: defaultdict[Hashable, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device_mesh if is_dtensor(tensor) else None].append(tensor)  # pyright: ignore[reportAttributeAccessIssue]  # a DTensor's
    return groups
