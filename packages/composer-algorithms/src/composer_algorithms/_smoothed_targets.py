"""Targets changed while the loss is computed, and the class indices behind them for cross entropy."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from composer_algorithms._method import Method
from composer_algorithms._tensors import batch_tensor, require_tensor
from composer_events import Event, Logger, State
from composer_models.losses import soft_cross_entropy
from composer_models.targets import IGNORED, can_read_values, check_for_index_targets, ensure_targets_one_hot

# Queries that need no values: the expanded scalar has the shape, the dtype and the device of the real targets.
_ABOUT_THE_FORM = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.is_complex),
        # Of the expanded scalar itself: torch.compile compares them with those of the underlying tensor.
        *(Tensor.stride, Tensor.storage_offset, Tensor.is_contiguous),
    ]
)


class SmoothedTargets(Tensor):
    """Targets with one value per class, which take up memory only when an operation needs the values.

    `torch.nn.functional.cross_entropy` and `soft_cross_entropy` compute the loss from the indices. This saves the time
    and memory of a tensor as large as the logits, and excludes labels that are negative or equal to their
    `ignore_index`. All other operations get the values of `dense`.
    """

    labels: tuple[Tensor, ...]
    own_weight: float
    smoothing: float
    found: Tensor | None

    @classmethod
    def of(cls, logits: Tensor, *labels: Tensor, own_weight: float = 1.0, smoothing: float = 0.0) -> "SmoothedTargets":
        """Create targets of shape `logits.shape` from labels: class indices, and for mixed targets also the others."""
        # An expanded scalar has the shape of the logits and the memory of one element.
        targets = torch.zeros((), device=labels[0].device).expand(logits.shape).as_subclass(cls)
        targets.labels, targets.own_weight, targets.smoothing, targets.found = labels, own_weight, smoothing, None
        return targets

    def smoothed(self, smoothing: float) -> "SmoothedTargets":
        """Return targets with a share of the rest, the part not spread yet, spread over all classes."""
        # Of the unsmoothed targets the share `(1 - a) * (1 - b)` remains.
        smoothing = self.smoothing + smoothing - self.smoothing * smoothing
        return self.of(self, *self.labels, own_weight=self.own_weight, smoothing=smoothing)

    def dense(self) -> Tensor:
        """Return the values, cached after the first call. The row of an ignored label is zero."""
        if self.found is None:
            # Otherwise each operation below would come back here through __torch_function__.
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
        """Compute the loss from the indices and shape queries without values, and everything else with the values."""
        options = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():  # as in PyTorch's notes on extending it
            if func in _ABOUT_THE_FORM:
                return func(*args, **options)
            if func is soft_cross_entropy:
                return _from_indices(*args, **options)
            if func is F.cross_entropy and (loss := _from_indices_as_torch(*args, **options)) is not None:
                return loss
            return func(*_with_values(args), **_with_values(options))


class TargetChange(Method):
    """Base of the algorithms that change the targets from `BEFORE_LOSS` to `AFTER_LOSS`."""

    target_key: Any
    original_labels: Tensor | None = None

    @abstractmethod
    def smooth(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the targets for the loss of the outputs, without changing the given ones."""

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Change the targets before the loss and restore them after it."""
        if event == Event.BEFORE_LOSS:
            outputs = require_tensor(state.outputs, "the model's output")
            labels = batch_tensor(state, self.target_key, "target_key")
            state.batch_set_item(self.target_key, self.smooth(outputs, labels))
            self.original_labels = labels
        elif event == Event.AFTER_LOSS and self.original_labels is not None:
            # Metrics and callbacks expect the original labels.
            state.batch_set_item(self.target_key, self.original_labels)
            self.original_labels = None


def are_labels(logits: Tensor, target: Tensor) -> bool:
    """Return whether targets are one class index per example of the logits."""
    return logits.ndim >= 2 and target.shape == logits.shape[:1] + logits.shape[2:] and check_for_index_targets(target)


def _from_indices_as_torch(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORED,
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
    ignore_index: int = IGNORED,
    reduction: str = "mean",
    is_wide: bool = True,
) -> Tensor:
    given = [each.long() for each in target.labels]
    labels = [each.where((each >= 0) & (each != ignore_index), IGNORED) for each in given]
    for each in labels:
        if can_read_values(each) and each.numel() and int(each.max()) >= input.shape[1]:
            ensure_targets_one_hot(input, each)  # raises an error that names the number of classes
    if torch.is_autocast_enabled(input.device.type):
        input = input.float()  # once instead of in each loss, so that both gradients are rounded together
    losses = [
        F.cross_entropy(input, each, weight, reduction="none", label_smoothing=target.smoothing) for each in labels
    ]
    # Cross entropy is linear in the target: the blend of the losses is the loss of the blend.
    loss = torch.lerp(losses[1], losses[0], target.own_weight) if len(losses) > 1 else losses[0]
    if reduction == "none":
        return loss
    # In 16 bits, the sum over many examples would overflow.
    total = loss.sum(dtype=torch.promote_types(loss.dtype, torch.float32))
    if reduction == "mean":
        # By the number of labels also with class weights, as for the dense targets that these stand for. cross_entropy
        # with label_smoothing= would divide by the sum of the labels' weights.
        counts = [(each >= 0).sum(dtype=total.dtype) for each in labels]
        total = total / (torch.lerp(counts[1], counts[0], target.own_weight) if len(counts) > 1 else counts[0])
    return total if is_wide else total.to(loss.dtype)


def _with_values(arguments: Any) -> Any:
    if isinstance(arguments, SmoothedTargets):
        return arguments.dense()
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(map(_with_values, arguments))
    if isinstance(arguments, dict):
        return {key: _with_values(value) for key, value in arguments.items()}
    return arguments
