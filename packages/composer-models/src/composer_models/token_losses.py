"""Cross entropy of a linear output layer, computed without the logits of all tokens in memory."""

import math
import os
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from composer_models.optional import MissingConditionalImportError

__all__ = ["TokenLosses", "linear_cross_entropy"]

# Chunks are large enough for efficient matrix products, and there are enough of them to save memory in small batches.
_CHUNK_ELEMENTS = 2**24
_MIN_CHUNK_TOKENS = 512
_MIN_CHUNKS = 8

Kernel: TypeAlias = Literal["torch", "liger"]


class TokenLosses(NamedTuple):
    """Output of a language model whose loss was computed without logits.

    `LanguageCrossEntropy`, `LanguagePerplexity` and `MaskedAccuracy` accept it in place of logits.

    Attributes:
        loss: The loss, a scalar.
        cross_entropy: Cross entropy of each token, without smoothing and other terms, and without gradients. 0 for
            ignored tokens.
        is_correct: Whether the target of each token has the largest logit.
        log_z: Logarithm of the sum of the exponentials of each token's logits.
    """

    loss: Tensor
    cross_entropy: Tensor
    is_correct: Tensor
    log_z: Tensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    kernel: Kernel = "torch",
) -> TokenLosses:
    """Compute the mean cross entropy of `linear(hidden, weight, bias)`, with the logits of a few tokens at a time.

    The backward pass computes the logits again. Values and gradients are those of `torch.nn.functional.cross_entropy`
    on all logits, up to the rounding of sums. Within autocast, the matrix products are in its dtype; the rest is in
    float32, or in float64 for float64 inputs.

    A `weight` sharded over its first dim by tensor parallelism stays sharded: every rank of its mesh must call this.

    Args:
        hidden: Shape `(..., features)`.
        weight: Shape `(classes, features)`, such as the weights of an output layer or of tied embeddings.
        target: Class indices of shape `(...)`.
        bias: Shape `(classes,)`.
        token_weights: Factor of each token in the mean, of the shape of `target`.
        ignore_index: Target of tokens that do not count.
        label_smoothing: As in `cross_entropy`, in [0, 1].
        z_loss: Factor of the mean of `log_z^2`, which is added to the loss.
        softcap: Bound of the logits, above 0: `softcap * tanh(logits / softcap)`.
        kernel: `'torch'` computes the chunks with PyTorch on any device. `'liger'` uses the Triton kernel of
            liger-kernel, on GPUs and without `label_smoothing`; it accumulates in float32.

    Returns:
        The loss and values of each token. The loss is NaN if no token counts, or if a target is not a class of a
        sharded `weight`.

    Raises:
        MissingConditionalImportError: If `kernel` is `'liger'` and liger-kernel is not installed.
        ValueError: If the shapes do not fit, `label_smoothing` or `softcap` is out of range, a rank would have no
            classes of a sharded `weight`, or `kernel` is unknown or cannot be used here.

    Example:
        >>> hidden, weight = torch.zeros(2, 3, 8), torch.randn(4, 8)
        >>> linear_cross_entropy(hidden, weight, torch.tensor([[0, 1, -100], [2, 3, 0]])).loss
        tensor(1.3863)

    Reference:
        Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024, arXiv:2411.09009. Hsu et al.,
        "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024, arXiv:2410.10989.
    """
    check_kernel(kernel, label_smoothing, hidden.device)
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"the targets have shape {tuple(target.shape)} and must have {tuple(hidden.shape[:-1])}, that of the "
            f"hidden states without their last dim. Pass one label for each token."
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing!r} must be in [0, 1].")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap!r} must be above 0 and finite. Pass None for logits without a bound.")
    statistics = token_statistics(hidden, weight, target, bias, ignore_index, softcap, kernel)
    return reduce_statistics(statistics, target, token_weights, ignore_index, label_smoothing, z_loss)


def check_kernel(kernel: str, label_smoothing: float = 0.0, device: torch.device | None = None) -> None:
    """Validate the argument `kernel` of `linear_cross_entropy` without a device, or for a device."""
    if kernel == "torch":
        return
    if kernel != "liger":
        raise ValueError(f"kernel={kernel!r} must be 'torch' or 'liger'.")
    if label_smoothing:
        raise ValueError(
            f"kernel='liger' cannot be combined with label_smoothing={label_smoothing!r}: it does not compute the mean "
            f"of the logits. Use kernel='torch'."
        )
    # With this variable, Triton interprets kernels on CPUs, which serves tests.
    if device is not None and device.type in ("cpu", "mps") and "TRITON_INTERPRET" not in os.environ:
        raise ValueError(f"kernel='liger' runs on GPUs; got tensors on {device.type!r}. Use kernel='torch'.")
    _liger()


_installed_version = cache(version)  # which reads files


@torch.compiler.disable()
def _liger() -> Any:
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # the extra `liger`

        installed = _installed_version("liger-kernel")
    except ImportError as error:  # or PackageNotFoundError
        raise MissingConditionalImportError("liger", "liger-kernel", distribution="composer-models") from error
    if [int(number) for number in re.findall(r"\d+", installed)[:3]] < [0, 8, 2]:
        raise ValueError(
            f"kernel='liger' needs liger-kernel 0.8.2 or later, whose gradients are right where tokens have weights; "
            f"got {installed}. Run `pip install 'composer-models[liger]'`."
        )
    return LigerFusedLinearCrossEntropyLoss


def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    kernel: Kernel = "torch",
) -> Tensor:
    """Compute the statistics of each token's logits that losses need, in one tensor of shape `(..., 5)`.

    Returns:
        `log_z`, the target's logit, the mean of the logits (NaN with `kernel='liger'`), their maximum, and whether the
        target has it. The first three have gradients.
    """
    # Not F.linear_cross_entropy of torch 2.13 and later: it has no smoothing, cap or z-loss in chunks, no values of
    # each token for metrics, and torch.compile breaks the graph at it.
    index = target.masked_fill(target == ignore_index, 0).flatten()
    if isinstance(weight, DTensor):
        statistics = _sharded_statistics(hidden, weight, index, bias, softcap, kernel)
    else:
        statistics = _statistics_of(hidden, weight, index, bias, softcap, kernel)
    return statistics.unflatten(0, target.shape)


def reduce_statistics(
    statistics: Tensor,
    target: Tensor,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> TokenLosses:
    """Compute the loss from the result of `token_statistics`; the arguments are those of `linear_cross_entropy`."""
    log_z, target_logit, mean_logit, _, is_correct = statistics.unbind(-1)
    counts = target != ignore_index
    cross_entropy = log_z - target_logit
    losses = cross_entropy
    if label_smoothing:
        losses = torch.lerp(losses, log_z - mean_logit, label_smoothing)
    if z_loss:
        losses = losses + z_loss * log_z.square()
    weights = counts.to(losses.dtype)
    if token_weights is not None:
        weights = weights * token_weights.to(losses.dtype)
    # Where, not a product: the loss of an ignored token may be infinite.
    loss = (torch.where(counts, losses, 0.0) * weights).sum() / weights.sum()
    return TokenLosses(loss, torch.where(counts, cross_entropy, 0.0).detach(), (is_correct > 0) & counts, log_z)


def _statistics_of(
    hidden: Tensor, weight: Tensor, index: Tensor, bias: Tensor | None, softcap: float | None, kernel: Kernel
) -> Tensor:
    hidden = hidden.flatten(0, -2)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if kernel == "liger":
        with torch.autocast(hidden.device.type, enabled=False):
            return _liger_statistics(hidden, weight, bias, index, softcap)
    return _token_statistics(hidden, weight, bias, index, softcap or 0.0)


@torch.compiler.disable()  # the kernel waits for the device, which breaks the graph in any case
def _liger_statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, softcap: float | None
) -> Tensor:
    """Compute the statistics from the cross entropy of each token and single logits, all with gradients."""

    # Here and not when training begins: with offloading, the weights are on the CPU until they are used.
    check_kernel("liger", device=hidden.device)

    def logits_of(classes: Tensor) -> Tensor:
        logits = (hidden * F.embedding(classes, weight)).sum(dim=-1, dtype=dtype)
        logits = logits if bias is None else logits + bias[classes]
        return softcap * torch.tanh(logits / softcap) if softcap else logits

    dtype = torch.promote_types(hidden.dtype, torch.float32)
    target_logit = logits_of(index)  # first, since it finds targets that are not a class, which the kernel does not
    compute = _liger()(reduction="none", softcap=softcap, accum_dtype=torch.float32, return_predicted_tokens=True)
    output = compute(weight, hidden, index, bias)
    with torch.no_grad():
        maximum = logits_of(output.predicted_tokens)
    log_z = output.loss + target_logit
    is_correct = output.predicted_tokens == index
    return torch.stack([log_z, target_logit, torch.full_like(log_z, torch.nan), maximum, is_correct.to(dtype)], dim=-1)


def _sharded_statistics(
    hidden: Tensor, weight: DTensor, index: Tensor, bias: Tensor | None, softcap: float | None, kernel: Kernel
) -> Tensor:
    """Combine the statistics of each rank's classes."""
    mesh = weight.device_mesh
    if mesh.ndim != 1 or weight.placements != (Shard(0),):
        raise ValueError(
            f"the weight of the output layer has placements {weight.placements} on a mesh of {mesh.ndim} dims, and "
            f"must be Shard(0) on a mesh of one dim. Shard the output layer with ColwiseParallel."
        )
    size = -(-weight.shape[0] // mesh.size())  # of all shards but the last, as torch.chunk cuts
    if size * (mesh.size() - 1) >= weight.shape[0]:
        raise ValueError(
            f"the weight of the output layer has {weight.shape[0]} classes, and some of the {mesh.size()} ranks of "
            f"its mesh have none. Use fewer ranks for tensor parallelism, or pad the vocabulary."
        )
    if not isinstance(hidden, DTensor):
        hidden = DTensor.from_local(hidden, mesh, [Replicate()])
    # The gradient of each rank is that of its classes, and they are added.
    hidden = hidden.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    local_weight = weight.to_local()
    local_bias = bias.to_local() if isinstance(bias, DTensor) else bias
    here = index - size * mesh.get_local_rank()
    is_here = (here >= 0) & (here < local_weight.shape[0])
    own = _statistics_of(hidden, local_weight, here.where(is_here, 0), local_bias, softcap, kernel)
    log_z, target_logit, mean_logit, maximum, is_correct = own.unbind(-1)
    rows = [log_z, target_logit * is_here, mean_logit * local_weight.shape[0], maximum, is_correct * is_here]
    # No shard has a target that is not a class. NaN shows this without waiting for the device.
    is_class = (index >= 0) & (index < weight.shape[0])
    gathered = DTensor.from_local(torch.stack(rows)[None], mesh, [Shard(0)]).full_tensor()
    return torch.stack(
        [
            gathered[:, 0].logsumexp(0),
            gathered[:, 1].sum(0).where(is_class, torch.nan),
            gathered[:, 2].sum(0) / weight.shape[0],
            gathered[:, 3].amax(0),
            (gathered[:, 4] * (gathered[:, 3] == gathered[:, 3].amax(0))).amax(0),
        ],
        dim=-1,
    )


def _chunks(num_tokens: int, num_classes: int) -> Iterator[slice]:
    chunk_size = max(_MIN_CHUNK_TOKENS, _CHUNK_ELEMENTS // num_classes)
    chunk_size = max(1, min(chunk_size, num_tokens // _MIN_CHUNKS))
    return (slice(start, start + chunk_size) for start in range(0, num_tokens, chunk_size))


def _logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits


# Operators, which torch.compile does not look into: it would find that the logits of the forward and the backward pass
# are equal and keep them.
@torch.library.custom_op("composer_models::token_statistics", mutates_args=())
def _token_statistics(hidden: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, softcap: float) -> Tensor:
    statistics = hidden.new_empty((len(hidden), 5), dtype=torch.promote_types(hidden.dtype, torch.float32))
    with torch.autocast(hidden.device.type, enabled=False):
        for rows in _chunks(len(hidden), len(weight)):
            log_z, target_logit, mean_logit, maximum, is_correct = statistics[rows].unbind(-1)
            logits, targets = _logits_of(hidden[rows], weight, bias, softcap), index[rows]
            largest, best = logits.max(dim=-1)
            target_logit.copy_(logits.gather(1, targets[:, None])[:, 0])
            mean_logit.copy_(logits.mean(dim=-1))
            maximum.copy_(largest)
            is_correct.copy_(best == targets)
            # On CPUs, softmax and log_softmax are several times as fast as exp, in particular where it underflows.
            log_z.copy_(largest - logits.log_softmax(dim=-1).gather(1, best[:, None])[:, 0])
    return statistics


@_token_statistics.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, softcap: float) -> Tensor:
    return hidden.new_empty((hidden.shape[0], 5), dtype=torch.promote_types(hidden.dtype, torch.float32))


@torch.library.custom_op("composer_models::token_statistics_backward", mutates_args=())
def _token_statistics_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    softcap: float,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    hidden_grad = torch.empty_like(hidden)
    # Gradients of many chunks are added in float32.
    weight_grad = weight.new_zeros(weight.shape if needs_weight else (0,), dtype=grad.dtype)
    bias_grad = weight.new_zeros(0 if bias is None else bias.shape, dtype=grad.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        for rows in _chunks(len(hidden), len(weight)):
            logits = _logits_of(hidden[rows], weight, bias, softcap)
            slope = logits.div(softcap).square_().neg_().add_(1) if softcap else None
            by_log_z, by_target, by_mean = grad[rows, :3, None].unbind(1)
            logits = logits.softmax(dim=-1).mul_(by_log_z)
            logits.scatter_add_(1, index[rows, None], by_target.to(logits.dtype)).add_(by_mean / len(weight))
            if slope is not None:
                logits.mul_(slope)
            if bias is not None:
                bias_grad += logits.sum(dim=0)
            of_logits = logits.to(hidden.dtype)
            hidden_grad[rows] = of_logits @ weight
            if needs_weight and weight.dtype == weight_grad.dtype:
                weight_grad.addmm_(of_logits.T, hidden[rows])
            elif needs_weight:
                weight_grad += of_logits.T @ hidden[rows]
    return hidden_grad, weight_grad.to(weight.dtype), bias_grad.to(weight.dtype)


@_token_statistics_backward.register_fake
def _(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    softcap: float,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    weight_grad = torch.empty_like(weight) if needs_weight else weight.new_empty(0)
    return torch.empty_like(hidden), weight_grad, weight.new_empty(0 if bias is None else bias.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, weight, bias, index, *ctx.settings = inputs
    ctx.save_for_backward(hidden, weight, bias, index)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs_weight = ctx.needs_input_grad[1]
    hidden, weight, bias = _token_statistics_backward(grad, *ctx.saved_tensors, *ctx.settings, needs_weight)
    return hidden, weight if needs_weight else None, bias if ctx.needs_input_grad[2] else None, None, None


_token_statistics.register_autograd(_backward, setup_context=_keep_for_backward)
