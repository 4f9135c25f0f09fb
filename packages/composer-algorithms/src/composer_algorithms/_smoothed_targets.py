"""Mixed and smoothed targets that cross entropy takes as the class indices they come from."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from composer_models.losses import soft_cross_entropy
from composer_models.targets import can_read_values, check_for_index_targets, ensure_targets_one_hot

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

    `torch.nn.functional.cross_entropy` and `soft_cross_entropy` compute the loss from the indices, which saves the time
    and memory of a tensor as large as the logits, and keeps labels out that are negative or their `ignore_index`. All
    else gets the values that `dense` makes.
    """

    labels: tuple[Tensor, ...]
    own_weight: float
    smoothing: float
    found: Tensor | None

    @classmethod
    def of(cls, logits: Tensor, *labels: Tensor, own_weight: float = 1.0, smoothing: float = 0.0) -> "SmoothedTargets":
        """Stand for targets of shape `logits.shape`.

        Args:
            logits: Only the shape is used.
            labels: Class indices, and for mixed targets those of the other examples.
            own_weight: The share of the first ones.
            smoothing: The share of both that is spread over all classes.
        """
        targets = torch.zeros((), device=labels[0].device).expand(logits.shape).as_subclass(cls)
        targets.labels, targets.own_weight, targets.smoothing, targets.found = labels, own_weight, smoothing, None
        return targets

    def smoothed(self, smoothing: float) -> "SmoothedTargets":
        """Return them with a share of what is not spread yet spread over all classes."""
        smoothing = self.smoothing + smoothing - self.smoothing * smoothing
        return self.of(self, *self.labels, own_weight=self.own_weight, smoothing=smoothing)

    def dense(self) -> Tensor:
        """Return the values. The row of an ignored label is zero."""
        if self.found is None:
            with torch._C.DisableTorchFunctionSubclass():
                own, *other = (ensure_targets_one_hot(self, labels) for labels in self.labels)
                values = torch.lerp(other[0], own, self.own_weight) if other else own
                if self.smoothing:
                    uniform = values.sum(dim=1, keepdim=True) * (self.smoothing / values.shape[1])
                    values.mul_(1 - self.smoothing).add_(uniform)
            self.found = values
        return self.found

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
            if func is soft_cross_entropy:
                return _from_indices(*args, **options)
            if func is F.cross_entropy and (loss := _from_indices_as_torch(*args, **options)) is not None:
                return loss
            return func(*_with_values(args), **_with_values(options))


def are_labels(logits: Tensor, target: Tensor) -> bool:
    """Return whether targets are one class index for each example of the logits."""
    return logits.ndim >= 2 and target.shape == logits.shape[:1] + logits.shape[2:] and check_for_index_targets(target)


def _from_indices_as_torch(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = _IGNORED,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    if size_average is not None or reduce is not None:
        return None
    if not isinstance(target, SmoothedTargets) or input.shape != target.shape:
        return None
    return _from_indices(input, target.smoothed(label_smoothing), weight, ignore_index, reduction, is_wide=False)


def _from_indices(
    input: Tensor,
    target: SmoothedTargets,
    weight: Tensor | None = None,
    ignore_index: int = _IGNORED,
    reduction: str = "mean",
    is_wide: bool = True,
) -> Tensor:
    labels = [_without_ignored(each.long(), ignore_index) for each in target.labels]
    for each in labels:
        if can_read_values(each) and each.numel() and int(each.max()) >= input.shape[1]:
            ensure_targets_one_hot(input, each)  # which says how many classes there must be
    if torch.is_autocast_enabled(input.device.type):
        input = input.float()  # once, as the loss would do for each, so that the gradients of both are rounded together
    losses = [
        F.cross_entropy(input, each, weight, reduction="none", label_smoothing=target.smoothing) for each in labels
    ]
    loss = torch.lerp(losses[1], losses[0], target.own_weight) if len(losses) > 1 else losses[0]
    if reduction == "none":
        return loss
    # A sum of many examples passes what 16 bits can hold.
    total = loss.sum(dtype=torch.promote_types(loss.dtype, torch.float32))
    if reduction == "mean":
        counts = [(each >= 0).sum(dtype=total.dtype) for each in labels]
        total = total / (torch.lerp(counts[1], counts[0], target.own_weight) if len(counts) > 1 else counts[0])
    return total if is_wide else total.to(loss.dtype)


def _without_ignored(labels: Tensor, ignore_index: int) -> Tensor:
    return labels.where((labels >= 0) & (labels != ignore_index), _IGNORED)


def _with_values(arguments: Any) -> Any:
    if isinstance(arguments, SmoothedTargets):
        return arguments.dense()
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(map(_with_values, arguments))
    if isinstance(arguments, dict):
        return {key: _with_values(value) for key, value in arguments.items()}
    return arguments
