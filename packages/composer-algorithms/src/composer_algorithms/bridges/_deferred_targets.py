"""Targets that take their values only when a loss is computed of them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LOSSES = frozenset(
    {
        *(F.cross_entropy, F.nll_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div),
        *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.poisson_nll_loss, F.gaussian_nll_loss),
        *(F.soft_margin_loss, F.multilabel_soft_margin_loss, F.multilabel_margin_loss, F.multi_margin_loss),
    }
)
# These leave class indices what they are.
_UNCHANGING = frozenset({Tensor.long, Tensor.contiguous, Tensor.detach, Tensor.clone})

ComputeLoss = Callable[[Any, Callable[[Any, Any], Any]], Any]


class DeferredTargets(Tensor):
    """Targets of a batch, for code that computes a loss of them which is out of reach.

    PyTorch's losses, given outputs and these, call `compute(outputs, loss)` in their place, where `loss(outputs,
    targets)` is the loss itself. All else gets the values that the batch has.
    """

    compute: ComputeLoss

    @classmethod
    def of(cls, targets: Tensor, compute: ComputeLoss) -> "DeferredTargets":
        """Stand for targets; shares their memory."""
        deferred = targets.as_subclass(cls)
        deferred.compute = compute
        return deferred

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute with the values, but for losses."""
        named = dict(kwargs or {})
        if func in _LOSSES:
            outputs, targets, others = _arguments(args, named)
            if isinstance(targets, cls) and not isinstance(outputs, cls):
                return targets.compute(outputs, lambda outputs, targets: func(outputs, targets, *args[2:], **others))
        with torch._C.DisableTorchFunctionSubclass():  # as PyTorch's notes on extending it do
            result = func(*args, **named)
        if func in _UNCHANGING:
            return cls.of(result, args[0].compute)
        return _plain(result)


def _arguments(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    others = {name: value for name, value in named.items() if name not in ("input", "target")}
    outputs = args[0] if args else named.get("input")
    return outputs, args[1] if len(args) > 1 else named.get("target"), others


def _plain(result: Any) -> Any:
    if isinstance(result, DeferredTargets):  # such as what indexing gives
        with torch._C.DisableTorchFunctionSubclass():
            return result.as_subclass(Tensor)
    if isinstance(result, (tuple, list)) and type(result) in (tuple, list):
        return type(result)(map(_plain, result))
    return result
