"""Smoothed targets that cross entropy takes as the class indices they come from."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_IGNORED = -100  # cross entropy's own default, to which any negative label is mapped
# What can be answered without values: the tensor has the shape, the dtype and the device of what it stands for.
_ABOUT_THE_FORM = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.is_complex),
        # Its own, which torch.compile compares with what it sees from below.
        *(Tensor.stride, Tensor.storage_offset, Tensor.is_contiguous),
    ]
)


class SmoothedTargets(Tensor):
    """Targets with one value for each class, which takes up memory only once something asks for a value.

    `torch.nn.functional.cross_entropy` with no further options than `reduction` gets the loss from the indices, which
    saves the time and memory of a tensor as large as the logits. All else gets the values that `dense` makes.
    """

    labels: Tensor
    smoothing: float
    dense: Callable[[], Tensor]

    @classmethod
    def of(cls, logits: Tensor, indices: Tensor, smoothing: float, dense: Callable[[], Tensor]) -> "SmoothedTargets":
        """Stand for what `dense` returns: the targets of shape `logits.shape` that `indices` are smoothed to."""
        targets = torch.zeros((), device=indices.device).expand(logits.shape).as_subclass(cls)
        targets.labels, targets.smoothing, targets.dense = indices, smoothing, functools.cache(dense)
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
        with torch._C.DisableTorchFunctionSubclass():  # as PyTorch's notes on extending it do
            if func in _ABOUT_THE_FORM:
                return func(*args, **options)
            if func is F.cross_entropy and (loss := _from_indices(*args, **options)) is not None:
                return loss
            if func in (torch.sum, Tensor.sum) and len(args) == 1 and options.keys() <= {"dtype"}:
                # Each row adds up to 1, but for those of ignored labels.
                return (args[0].labels >= 0).sum().to(options.get("dtype") or torch.float32)
            return func(*_with_values(args), **_with_values(options))


def _from_indices(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = _IGNORED,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    del ignore_index  # without effect on targets with one value for each class
    if weight is not None or size_average is not None or reduce is not None or label_smoothing != 0:
        return None
    if not isinstance(target, SmoothedTargets) or input.shape != target.shape:
        return None
    indices = target.labels.long()
    indices = indices.where(indices >= 0, _IGNORED)
    if reduction != "mean":
        return F.cross_entropy(input, indices, reduction=reduction, label_smoothing=target.smoothing)
    # The mean of targets with values counts ignored labels too; that of indices would not.
    loss = F.cross_entropy(input, indices, reduction="sum", label_smoothing=target.smoothing)
    return loss / indices.numel()


def _with_values(arguments: Any) -> Any:
    if isinstance(arguments, SmoothedTargets):
        return arguments.dense()
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(map(_with_values, arguments))
    if isinstance(arguments, dict):
        return {key: _with_values(value) for key, value in arguments.items()}
    return arguments
