"""Label smoothing: blend the targets with the uniform distribution over the classes."""

from typing import Any

from torch import Tensor

from composer_algorithms._arguments import accept_legacy_arguments, check_interval
from composer_algorithms._smoothed_targets import SmoothedTargets, TargetChange, are_labels
from composer_algorithms._tensors import require_tensor
from composer_algorithms.metadata import METHODS
from composer_events import Event
from composer_models.targets import ensure_targets_one_hot, infer_target_type

__all__ = ["LabelSmoothing", "smooth_labels", "METADATA"]

METADATA = METHODS["label_smoothing"]


@accept_legacy_arguments("smooth_labels", renamed={"alpha": "smoothing", "targets": "target"})
def smooth_labels(logits: Tensor, target: Tensor, smoothing: float = 0.1) -> Tensor:
    """Blend targets with the uniform distribution over the classes.

    With `C = logits.shape[1]` classes the result is `(1 - smoothing) * y + smoothing / C`, where `y` is the target
    with one value per class. The inputs are not changed. Negative class indices are ignored labels: their rows are zero
    and add nothing to the loss.

    Args:
        logits: Shape `(batch, classes, ...)`. Only the shape is used.
        target: Class indices of shape `(batch, ...)`, or one value per class in the shape of `logits`.
        smoothing: Fraction of the probability to spread over the classes, in [0, 1]. 0 does not smooth.

    Returns:
        Smoothed targets in the shape of `logits`, float32, on the device of `target`.

    Raises:
        TypeError: If `smoothing` is not a number, or `logits` or `target` not a tensor.
        ValueError: If `smoothing` is outside [0, 1], or `target` has class indices that are not integers.
        RuntimeError: If `logits` has no class dim, or its shape does not match that of `target`.

    Example:
        >>> import torch
        >>> smooth_labels(torch.zeros(1, 4), torch.tensor([2]), smoothing=0.4)
        tensor([[0.1000, 0.1000, 0.7000, 0.1000]])

    Reference:
        Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2015, arXiv:1512.00567, section 7.
    """
    check_interval("[0, 1]", smoothing=smoothing)
    require_tensor(logits, "logits")
    require_tensor(target, "target")
    if logits.ndim < 2:
        raise RuntimeError(
            f"logits of shape {tuple(logits.shape)} have no class dim: pass (batch, classes, ...), two logits for "
            f"each example where there are two classes."
        )
    if infer_target_type(logits, target) == "indices" and target.shape != logits.shape[:1] + logits.shape[2:]:
        raise RuntimeError(
            f"target of shape {tuple(target.shape)} does not have one class for each example of logits of shape "
            f"{tuple(logits.shape)}: pass the shape of the logits without dim 1."
        )
    uniform = smoothing / logits.shape[1]
    one_hot = ensure_targets_one_hot(logits, target)
    if infer_target_type(logits, target) == "one_hot":
        return (one_hot * (1 - smoothing)).add_(uniform)  # not in place: one_hot may be the caller's tensor
    # The mask keeps the rows of ignored labels at zero.
    return one_hot.mul_(1 - smoothing).add_(uniform * (target >= 0).unsqueeze(1))


class LabelSmoothing(TargetChange):
    """Smooth the targets while the loss is computed.

    On `BEFORE_LOSS` the targets in `state.batch` become `smooth_labels(state.outputs, targets, smoothing)`; on
    `AFTER_LOSS` they are restored. The loss must accept one value per class. These values are computed lazily:
    `torch.nn.functional.cross_entropy` does not need them, as it smooths class indices itself. Labels that are negative
    or its `ignore_index`, such as 255, add nothing to its loss. With class weights, its mean is divided by the number
    of labels, not by the sum of their weights. It runs after MixUp and CutMix, which mix the original labels.

    Args:
        smoothing: Fraction of the probability to spread over the classes, in [0, 1].
        target_key: Index, key or `(getter, setter)` pair of the targets in the batch.

    Raises:
        ValueError: If `smoothing` is outside [0, 1].

    Example:
        >>> algorithm = LabelSmoothing(smoothing=0.1)
        >>> algorithm
        LabelSmoothing(smoothing=0.1, target_key=1)

    Reference:
        Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2015, arXiv:1512.00567.
    """

    runs_after = frozenset({"MixUp", "CutMix"})  # they mix the original labels
    schedulable = ("smoothing",)
    acts_on = frozenset({Event.BEFORE_LOSS, Event.AFTER_LOSS})

    @accept_legacy_arguments("LabelSmoothing", renamed={"alpha": "smoothing"})
    def __init__(self, smoothing: float = 0.1, target_key: Any = 1) -> None:
        check_interval("[0, 1]", smoothing=smoothing)
        self.smoothing = smoothing
        self.target_key = target_key

    def smooth(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Smooth targets other than those of the batch, for algorithms that compute a second loss.

        Args:
            outputs: Logits of shape `(batch, classes, ...)`.
            target: Class indices, or one value per class. Not changed.

        Returns:
            A tensor, possibly lazy, with the values of `smooth_labels(outputs, target, self.smoothing)`.
        """
        if isinstance(target, SmoothedTargets):
            return target.smoothed(self.smoothing)
        if are_labels(outputs, target):  # saves a tensor as large as the logits
            return SmoothedTargets.of(outputs, target, smoothing=self.smoothing)
        return smooth_labels(outputs, target, self.smoothing)
