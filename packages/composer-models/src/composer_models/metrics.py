"""Metrics for classification and segmentation, and a metric for any loss function."""

from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from composer_models.losses import soft_cross_entropy
from composer_models.targets import can_read_values, check_for_index_targets, infer_target_type

__all__ = ["Metrics", "metrics_by_name", "counting_from_zero", "LossMetric", "CrossEntropy", "MIoU", "Dice"]

Metrics = Metric | MetricCollection | torch.nn.ModuleDict | Mapping[str, Metric] | Iterable[Metric]


def metrics_by_name(metrics: Metrics | None) -> dict[str, Metric]:
    """Convert metrics in any accepted form to a dict of metrics by name.

    Args:
        metrics: One metric or several without names, which are named after their classes; a collection, a mapping or
            a `ModuleDict`, with names and order kept; or `None` for no metrics.

    Returns:
        The same metrics by name.

    Raises:
        ValueError: If two metrics without names have the same class.
        TypeError: If an item is not a torchmetrics metric.

    Example:
        >>> list(metrics_by_name(CrossEntropy()))
        ['CrossEntropy']
    """
    if metrics is None:
        return {}
    if isinstance(metrics, Metric):
        metrics = [metrics]
    if isinstance(metrics, torch.nn.ModuleDict | Mapping):  # a collection is a ModuleDict too
        named: list[tuple[str, Any]] = [(str(name), metric) for name, metric in metrics.items()]
    else:
        named = [(type(metric).__name__, metric) for metric in metrics]
    by_name: dict[str, Metric] = {}
    for name, metric in named:
        if not isinstance(metric, Metric):
            raise TypeError(f"metrics has {metric!r} under {name!r}, which is not a torchmetrics.Metric.")
        if name in by_name:
            raise ValueError(f"metrics has two of class {name}: give them names, as in {{'top1': ..., 'top5': ...}}.")
        by_name[name] = metric
    return by_name


def counting_from_zero() -> AbstractContextManager[Any]:
    """Return the context in which a model creates its metrics, so that they have values even on the meta device.

    Metric states on the meta device would have no initial values, and none could be set later.

    Example:
        >>> with torch.device("meta"), counting_from_zero():
        ...     metric = CrossEntropy()
        >>> metric.total_batches
        tensor(0.)
    """
    return torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext()


class _MeanLoss(Metric):
    """Base of metrics that divide a sum of losses by the number of targets."""

    full_state_update = False
    sum_loss: Tensor
    total_batches: Tensor

    def __init__(self, dist_sync_on_step: bool) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        self.add_state("sum_loss", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("total_batches", default=torch.tensor(0.0), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        """Divide the sum of losses by the number of targets."""
        return self.sum_loss / self.total_batches


class LossMetric(_MeanLoss):
    """Mean of a loss function over samples, or over the targets that are not ignored.

    The loss of each batch is weighted by the number of elements in its targets, without those equal to `ignore_index`,
    or by their class weights if the loss function is a cross entropy that has them. For targets in a
    mapping or a tuple the first one is counted, for a list its length.

    Args:
        loss_function: Called with the predictions and the targets of a batch; returns the batch's mean loss. 16-bit
            arguments are converted to float32, because a 16-bit loss has too few digits to average.
        dist_sync_on_step: Synchronize over ranks at every `forward` of the metric.
        ignore_index: The integer target that the loss function leaves out of its mean. By default the loss function's
            own `ignore_index`, as in modules and partial functions, or -100, as in PyTorch.

    Attributes:
        sum_loss: The sum of the losses so far.
        total_batches: The divisor, the number of targets. The name is Composer's, also in checkpoints.

    Example:
        >>> metric = LossMetric(torch.nn.functional.mse_loss)
        >>> metric.update(torch.tensor([1.0]), torch.tensor([3.0]))
        >>> metric.compute()
        tensor(4.)
    """

    def __init__(
        self,
        loss_function: Callable[..., Tensor],
        dist_sync_on_step: bool = False,
        *,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(dist_sync_on_step)
        self.loss_function = loss_function
        bound = getattr(loss_function, "keywords", {})
        known = (ignore_index, getattr(loss_function, "ignore_index", None), bound.get("ignore_index"))
        self.ignore_index: int = next((index for index in known if index is not None), -100)
        # Other losses with class weights, such as MultiMarginLoss, divide by the number of labels all the same.
        function = getattr(loss_function, "func", loss_function)
        weighted = isinstance(function, nn.CrossEntropyLoss | nn.NLLLoss) or function in (F.cross_entropy, F.nll_loss)
        self.class_weight: Any = getattr(loss_function, "weight", bound.get("weight")) if weighted else None

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add the loss of a batch."""
        loss = torch.as_tensor(self.loss_function(_at_least_float32(preds), _at_least_float32(target)))
        num_targets = _num_targets(target, self.ignore_index, self.class_weight)
        # The mean over no targets is NaN, and NaN times 0 is NaN too.
        self.sum_loss += (loss * num_targets).masked_fill(loss.isnan() & (num_targets == 0), 0.0)
        self.total_batches += num_targets


class CrossEntropy(_MeanLoss):
    """Mean of `soft_cross_entropy` over samples, or over the labels that are not ignored.

    Args:
        ignore_index: The class index that is ignored.
        dist_sync_on_step: Synchronize over ranks at every `forward` of the metric.

    Attributes:
        sum_loss: The sum of the losses so far.
        total_batches: The divisor: the number of labels, or the total probability of targets with one per class. The
            name is Composer's, also in checkpoints.

    Example:
        >>> metric = CrossEntropy()
        >>> metric.update(torch.zeros(4, 2), torch.tensor([0, 1, 1, 0]))
        >>> metric.compute()
        tensor(0.6931)
    """

    higher_is_better = False

    def __init__(self, ignore_index: int = -100, dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step)
        self.ignore_index = ignore_index

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add the cross entropy of each sample of a batch.

        Args:
            preds: Logits of shape `(batch, classes, ...)`.
            target: Class indices, or one probability per class.
        """
        preds = _at_least_float32(preds)
        is_dense = infer_target_type(preds, target) == "one_hot"
        self.sum_loss += soft_cross_entropy(preds, target, ignore_index=self.ignore_index, reduction="sum")
        # In float32, since a sum of bfloat16 probabilities would be rounded to 8 bits.
        self.total_batches += (target if is_dense else target != self.ignore_index).sum(dtype=torch.float32)


def _at_least_float32(tensor: Any) -> Any:
    """Convert 16-bit floating point tensors to float32; return anything else unchanged."""
    is_16_bit = isinstance(tensor, Tensor) and tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if is_16_bit else tensor


def _num_targets(target: Any, ignore_index: int, class_weight: Any) -> Any:
    while isinstance(target, Mapping | tuple) and target:
        target = next(iter(target.values() if isinstance(target, Mapping) else target))
    if isinstance(target, Tensor):
        if not check_for_index_targets(target):
            return target.numel()
        counts = target != ignore_index
        if isinstance(class_weight, Tensor) and class_weight.ndim == 1:
            # PyTorch divides the sum of the weighted losses by the sum of these weights, not by the number of labels.
            return (class_weight.to(target.device)[target.long() * counts] * counts).sum()
        return counts.sum()
    return len(target) if isinstance(target, Sized) else 1


class MIoU(Metric):
    """Mean intersection over union of the classes, in percent, for segmentation.

    Args:
        num_classes: The number of classes.
        ignore_index: The target of ignored pixels.

    Example:
        >>> metric = MIoU(num_classes=2)
        >>> logits = torch.tensor([[[0.0, 9.0]], [[9.0, 0.0]]]).unsqueeze(0)
        >>> metric.update(logits, torch.tensor([[[1, 0]]]))
        >>> metric.compute()
        tensor(100., dtype=torch.float64)
    """

    full_state_update = False
    higher_is_better = True
    total_intersect: Tensor
    total_union: Tensor

    def __init__(self, num_classes: int, ignore_index: int = -1) -> None:
        super().__init__(dist_sync_on_step=True)
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        # float64 counts pixels exactly far beyond the limit of float32.
        for name in ("total_intersect", "total_union"):
            self.add_state(name, default=torch.zeros(num_classes, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Count the pixels of a batch.

        Args:
            logits: Shape `(batch, classes, ...)`.
            targets: Class indices of shape `(batch, ...)`.

        Raises:
            ValueError: If `logits` do not have one channel per class, or a label is neither a class nor `ignore_index`
                (checked only if the targets are on the CPU).
        """
        if logits.shape[1] != self.num_classes:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} have {logits.shape[1]} channels in dim 1, where the metric has "
                f"num_classes={self.num_classes}: give one channel to each class, or change num_classes."
            )
        counted = targets.masked_fill(targets == self.ignore_index, 0)
        if can_read_values(targets) and counted.numel():
            for label in (int(extreme) for extreme in torch.aminmax(counted)):
                if not 0 <= label < self.num_classes:
                    raise ValueError(
                        f"targets have the label {label}, which is not a class: with num_classes={self.num_classes} "
                        f"labels are 0 to {self.num_classes - 1}, and ignore_index={self.ignore_index} for pixels that "
                        f"do not count. Pass ignore_index={label} if that is what it means, or raise num_classes."
                    )
        preds = logits.argmax(dim=1)
        counts = targets != self.ignore_index
        intersect = self._count(targets, counts & (preds == targets))
        self.total_intersect += intersect
        self.total_union += self._count(preds, counts) + self._count(targets, counts) - intersect

    def compute(self) -> Tensor:
        """Average over the classes that are in the targets or the predictions."""
        # A class without pixels is 0 / 0. Selecting by a mask would synchronize with the device.
        return 100 * (self.total_intersect / self.total_union).nanmean()

    def _count(self, classes: Tensor, where: Tensor) -> Tensor:
        # Ignored pixels go to an extra bin after the last class: selecting by a mask would synchronize with the device.
        binned = torch.where(where, classes, self.num_classes).flatten().long()
        bins = torch.zeros(self.num_classes + 1, dtype=torch.int64, device=classes.device)
        return bins.scatter_add_(0, binned, torch.ones_like(binned))[:-1]


class Dice(Metric):
    """Dice score of each foreground class, in percent, averaged over samples and classes.

    A class that is not in the targets of a sample scores 1 there if it is not predicted either, else 0.

    Args:
        num_classes: The number of foreground classes. Predictions have one more channel, the background, which is
            channel 0.

    Example:
        >>> metric = Dice(num_classes=1)
        >>> metric.update(torch.tensor([[[0.0, 0.0], [1.0, 1.0]]]), torch.tensor([[1, 0]]))
        >>> metric.compute()
        tensor(66.6700, dtype=torch.float64)

    Reference:
        Dice, "Measures of the Amount of Ecologic Association Between Species", Ecology 26(3), 1945.
    """

    full_state_update = False
    higher_is_better = True
    n_updates: Tensor
    dice: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__(dist_sync_on_step=True)
        self.num_classes = num_classes
        self.add_state("n_updates", default=torch.zeros(1), dist_reduce_fx="sum")
        self.add_state("dice", default=torch.zeros(num_classes), dist_reduce_fx="sum")

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Add the score of each foreground class in each sample of a batch.

        Args:
            pred: Shape `(batch, 1 + num_classes, ...)`.
            target: Class indices of shape `(batch, ...)`, or one value per class in the shape of `pred`.
        """
        if infer_target_type(pred, target) == "one_hot":
            target = target.argmax(dim=1)
        # The extra dim below allows samples without spatial dims, which flatten(1) would reject.
        foreground = torch.arange(1, self.num_classes + 1, device=pred.device).view(-1, 1, 1)
        predicted = pred.argmax(dim=1).unsqueeze(-1).flatten(1) == foreground  # classes, samples, pixels
        actual = target.unsqueeze(-1).flatten(1) == foreground
        # The denominator 2 tp + fp + fn is the sum of the sizes of both regions.
        both = predicted.sum(dim=-1) + actual.sum(dim=-1)
        self.dice += torch.where(both == 0, 1.0, 2 * (predicted & actual).sum(dim=-1) / both).sum(dim=1)
        self.n_updates += len(pred)

    def compute(self) -> Tensor:
        """Average over samples and classes, rounded to two decimals."""
        # On the device, without reading it; float64, so that the number is that of the two decimals.
        return (100 * self.dice / self.n_updates).mean().double().round(decimals=2)
