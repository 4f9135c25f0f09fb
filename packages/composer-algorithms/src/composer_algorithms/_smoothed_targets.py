"""Smoothed targets that cross entropy takes as the class indices they come from."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only  # no public module has it; in torch since 1.8

_IGNORED = -100  # cross entropy's own default, to which any negative label is mapped
# What can be answered without values: the tensor has the shape, the dtype and the device of what it stands for.
_ABOUT_THE_FORM = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.is_complex),
    ]
)


class SmoothedTargets(Tensor):
    """Targets with one value for each class, which takes up memory only once something asks for a value.

    `torch.nn.functional.cross_entropy` with no further options than `reduction` gets the loss from the indices, which
    saves the time and memory of a tensor as large as the logits. All else gets the values that `dense` makes.
    """

    indices: Tensor
    smoothing: float
    dense: Callable[[], Tensor]

    @classmethod
    def of(cls, logits: Tensor, indices: Tensor, smoothing: float, dense: Callable[[], Tensor]) -> "SmoothedTargets":
        """Stand for what `dense` returns: the targets of shape `logits.shape` that `indices` are smoothed to."""
        targets = torch.zeros((), device=indices.device).expand(logits.shape).as_subclass(cls)
        targets.indices, targets.smoothing, targets.dense = indices, smoothing, dense
        return targets

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute with the values, but for the loss and what asks for the form only."""
        options = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ABOUT_THE_FORM:
                return func(*args, **options)
            if func is F.cross_entropy and (loss := _from_indices(*args, **options)) is not None:
                return loss
            if func in (torch.sum, Tensor.sum) and len(args) == 1 and options.keys() <= {"dtype"}:
                # Each row adds up to 1, but for those of ignored labels.
                return (args[0].indices >= 0).sum().to(options.get("dtype") or torch.float32)
            args, options = tree_map_only(SmoothedTargets, lambda targets: targets.dense(), (args, options))
            return func(*args, **options)


def _from_indices(
    input: Any, target: Any, weight: Tensor | None = None, *rest: Any, reduction: str = "mean", **options: Any
) -> Tensor | None:
    if rest or options or weight is not None or not isinstance(target, SmoothedTargets):
        return None
    if input.shape != target.shape or reduction not in ("mean", "sum", "none"):
        return None
    indices = target.indices.long()
    indices = indices.where(indices >= 0, _IGNORED)
    if reduction != "mean":
        return F.cross_entropy(input, indices, reduction=reduction, label_smoothing=target.smoothing)
    # The mean of targets with values counts ignored labels too; that of indices would not.
    loss = F.cross_entropy(input, indices, reduction="sum", label_smoothing=target.smoothing)
    return loss / indices.numel()
