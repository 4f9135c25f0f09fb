"""Loss functions for targets that are class indices or have one value per class."""

import warnings
from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from composer_models.targets import can_read_values, check_for_index_targets, ensure_targets_one_hot, infer_target_type

__all__ = ["soft_cross_entropy", "binary_cross_entropy_with_logits", "loss_registry", "DiceLoss"]

Reduction = Literal["none", "sum", "mean"]


def soft_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the cross entropy with class indices or class probabilities.

    Indices, of any integer dtype, are passed to `torch.nn.functional.cross_entropy`. For dense targets the loss of an
    example is `-sum(target * log_softmax(input, dim=1) * weight, dim=1)`, and `reduction='mean'` divides the sum by the
    total probability in `target`, so that an all-zero row has as little weight as an ignored index.

    A total of zero or less is an error, and less than one per example a warning. Both are checked only on the CPU,
    because reading the total would synchronize other devices: there a total of zero results in NaN, as it does for
    indices that are all ignored.

    Args:
        input: Logits of shape `(batch, classes, ...)`.
        target: Class indices of shape `(batch, ...)`, or probabilities in the shape of `input`.
        weight: A factor for each class, shape `(classes,)`. For dense targets the mean is not divided by it.
        ignore_index: The class index that is ignored. Has no effect on dense targets.
        reduction: `'none'`, `'sum'` or `'mean'`.

    Returns:
        A scalar, or the loss of each example for `'none'`. For dense targets the scalar is at least float32, because a
        sum over many examples exceeds the range of 16 bits.

    Raises:
        ValueError: If `reduction` is unknown, or the total probability of dense targets is not positive.
        RuntimeError: If the shape of `target` does not fit `input`.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> by_index = soft_cross_entropy(logits, torch.tensor([0, 1]))
        >>> bool(by_index == soft_cross_entropy(logits, torch.eye(2)))
        True
    """
    _check_reduction(reduction)
    if has_torch_function_unary(target):  # such as smoothed labels of an algorithm, a tensor subclass
        arguments = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
        return handle_torch_function(soft_cross_entropy, (target,), input, target, **arguments)
    if infer_target_type(input, target) == "indices":
        indices = target.long() if check_for_index_targets(target) else target  # torch rejects other dtypes
        return F.cross_entropy(input, indices, weight=weight, ignore_index=ignore_index, reduction=reduction)
    if ignore_index != -100:
        warnings.warn(
            f"ignore_index={ignore_index} has no effect on targets with one value for each class: make the rows of "
            f"examples to ignore all zero instead.",
            UserWarning,
            stacklevel=2,
        )
    target = target if target.is_floating_point() else target.to(input.dtype)
    losses = F.cross_entropy(input, target, weight=weight, reduction="none")
    if reduction == "none":
        return losses
    loss = _wide_sum(losses)
    if reduction == "sum":
        return loss
    total = _wide_sum(target)
    if can_read_values(total):
        num_examples = target.numel() // target.shape[1]
        if total <= 0:
            raise ValueError(
                f"the targets have a total probability of {float(total)!r} over shape {tuple(target.shape)}, so there "
                f"is nothing to average over: at least one example needs a row with a positive sum."
            )
        # Rows that sum to 1 up to rounding, such as smoothed targets, are complete.
        if float(total) < num_examples * (1 - 8 * torch.finfo(target.dtype).eps):
            warnings.warn("Some targets have less than 1 total probability.", UserWarning, stacklevel=2)
    return loss / total


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: Reduction = "sum",
    pos_weight: Tensor | None = None,
    scale_by_batch_size: bool | None = True,
) -> Tensor:
    """Compute the binary cross entropy of each class.

    Args:
        input: Logits of shape `(batch, classes, ...)`.
        target: Class indices, or one value in [0, 1] per class in the shape of `input`.
        weight: A factor for each element, of a shape that broadcasts to `input`.
        reduction: `'none'`, `'sum'` or `'mean'`.
        pos_weight: A factor for the positive term of each class.
        scale_by_batch_size: Divide the reduced loss by `input.shape[0]`; with `'sum'` the result is the mean over
            examples of the sum over classes.

    Returns:
        A scalar, or the loss of each element for `'none'`.

    Raises:
        ValueError: If `reduction` is unknown.
        RuntimeError: If the shape of `target` does not fit `input`.

    Example:
        >>> binary_cross_entropy_with_logits(torch.zeros(4, 2), torch.tensor([0, 1, 1, 0]))
        tensor(1.3863)

    Reference:
        Wightman et al., "ResNet strikes back: An improved training procedure in timm", 2021, arXiv:2110.00476.
    """
    _check_reduction(reduction)
    target = ensure_targets_one_hot(input, target)
    loss = F.binary_cross_entropy_with_logits(input, target, weight, reduction=reduction, pos_weight=pos_weight)
    return loss / input.shape[0] if scale_by_batch_size else loss


loss_registry: dict[str, Callable[..., Tensor]] = {
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
    "soft_cross_entropy": soft_cross_entropy,
}
"""The losses of this module by name."""


class DiceLoss(torch.nn.Module):
    """Dice loss for segmentation: one minus the overlap of predicted and true regions.

    With `I = sum(target * input)` and `U = sum(target) + sum(input)` over the pixels of a class, the loss of the class
    is `1 - (2 I + 1e-5) / (U + 1e-5)`: exactly 0 for a perfect prediction. Pixels without a target, such as those with
    an ignored (negative) label, count neither in `I` nor in `U`.

    Args:
        sigmoid: Apply a sigmoid to the input.
        softmax: Apply a softmax over the classes to the input.
        squared_pred: Square input and target in `U`.
        jaccard: Compute the loss from intersection over union: `U` becomes `2 (U - I)`.
        batch: Sum over the batch as well as over the pixels before dividing.
        ignore_absent_classes: Leave out classes that are not in the target.
        reduction: `'mean'`, `'sum'` or `'none'` over the remaining dimensions: classes, and examples unless `batch`.

    Raises:
        ValueError: If both activations are set, or `reduction` is unknown.

    Example:
        >>> target = torch.tensor([[[0, 1], [1, 1]]])
        >>> perfect = torch.nn.functional.one_hot(target, 2).permute(0, 3, 1, 2).float()
        >>> DiceLoss()(perfect, target).item()
        0.0

    Reference:
        Milletari et al., "V-Net: Fully Convolutional Neural Networks for Volumetric Medical Image Segmentation",
        3DV 2016, arXiv:1606.04797.
    """

    # Added to both sides of the fraction, so that an absent and not predicted class has a loss of 0 and not 0 / 0.
    smoothing = 1e-5

    def __init__(
        self,
        sigmoid: bool = False,
        softmax: bool = False,
        squared_pred: bool = False,
        jaccard: bool = False,
        batch: bool = False,
        ignore_absent_classes: bool = False,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        if sigmoid and softmax:
            raise ValueError("sigmoid=True and softmax=True exclude each other: choose one activation.")
        _check_reduction(reduction)
        self.sigmoid = sigmoid
        self.softmax = softmax
        self.squared_pred = squared_pred
        self.jaccard = jaccard
        self.batch = batch
        self.ignore_absent_classes = ignore_absent_classes
        self.reduction: Reduction = reduction

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            input: Shape `(batch, classes, ...)`: probabilities, or logits with `sigmoid` or `softmax`.
            target: Class indices of shape `(batch, ...)` or one value per class in the shape of `input`.

        Returns:
            A scalar. For `'none'` the shape is `(batch, classes)`, `(classes,)` with `batch`, and one-dimensional with
            `ignore_absent_classes`.
        """
        target = ensure_targets_one_hot(input, target)
        has_target = target.any(dim=1, keepdim=True)
        pred = input.sigmoid() if self.sigmoid else input
        if self.softmax and input.shape[1] > 1:
            pred = input.softmax(dim=1)
        elif self.softmax:
            warnings.warn(
                "softmax=True was skipped: the input has one channel, whose softmax is 1 everywhere. Use sigmoid=True "
                "or give one channel to each class.",
                UserWarning,
                stacklevel=2,
            )
        # Dim 1 holds the classes and is never reduced.
        reduced_dims = [*([0] if self.batch else []), *range(2, input.ndim)]
        target_size = _sum(target, reduced_dims)
        intersection = _sum(target * pred, reduced_dims)
        # Only the sizes are squared, so after the intersection was computed from the values themselves.
        if self.squared_pred:
            target, pred = target**2, pred**2
        union = _sum(target, reduced_dims) + _sum(pred * has_target, reduced_dims)
        if self.jaccard:
            union = 2 * (union - intersection)
        loss = 1 - (2 * intersection + self.smoothing) / (union + self.smoothing)
        present = target_size > 0
        if self.reduction == "none":
            return loss[present] if self.ignore_absent_classes else loss
        if not self.ignore_absent_classes:
            return getattr(loss, self.reduction)()
        # Not `loss[present]`: a mask of unknown size would synchronize with the device.
        total = torch.where(present, loss, 0.0).sum()
        return total if self.reduction == "sum" else total / present.sum().clamp(min=1)


def _sum(tensor: Tensor, dims: list[int]) -> Tensor:
    # Tensor.sum reduces all dims for an empty list, but here an empty list means no reduction.
    return tensor.sum(dim=dims) if dims else tensor


def _wide_sum(tensor: Tensor) -> Tensor:
    # The largest float16 is 65504, and adding 1 to a bfloat16 of 256 does not change it.
    return tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))


def _check_reduction(reduction: str) -> None:
    known = get_args(Reduction)
    if reduction not in known:
        raise ValueError(f"reduction={reduction!r} is not known: choose one of {', '.join(map(repr, known))}.")
