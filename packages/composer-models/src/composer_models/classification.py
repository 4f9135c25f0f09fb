"""Classifiers from modules that compute logits."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from composer_models.base import ComposerModel
from composer_models.losses import soft_cross_entropy
from composer_models.metrics import CrossEntropy, counting_from_zero, metrics_by_name
from composer_models.optional import MissingConditionalImportError

__all__ = ["ComposerClassifier", "composer_timm"]


class ComposerClassifier(ComposerModel):
    """Model for batches of the form `(inputs, targets)`, with cross entropy as loss and accuracy as metric.

    Args:
        module: Maps inputs to logits of shape `(batch, classes, ...)`. Its attribute `num_classes`, if any, takes
            precedence.
        num_classes: The number of classes, for the default metrics.
        train_metrics: The metrics of training. Accuracy if `None`.
        val_metrics: The metrics of evaluation. Cross entropy and accuracy if `None`.
        loss_fn: Called with logits and targets.

    Raises:
        ValueError: If default metrics are needed and the number of classes is unknown.

    Warns:
        UserWarning: If `num_classes` differs from `module.num_classes`.

    Example:
        >>> model = ComposerClassifier(torch.nn.Linear(8, 3), num_classes=3)
        >>> batch = torch.ones(2, 8), torch.tensor([0, 2])
        >>> model(batch).shape
        torch.Size([2, 3])
        >>> list(model.get_metrics(is_train=False))
        ['CrossEntropy', 'MulticlassAccuracy']
    """

    num_classes: int | None = None

    def __init__(
        self,
        module: torch.nn.Module,
        num_classes: int | None = None,
        train_metrics: Metric | MetricCollection | None = None,
        val_metrics: Metric | MetricCollection | None = None,
        loss_fn: Callable[..., Any] = soft_cross_entropy,
    ) -> None:
        super().__init__()
        own = getattr(module, "num_classes", None)
        if own is not None and num_classes is not None and own != num_classes:
            warnings.warn(
                f"num_classes={num_classes} differs from {type(module).__name__}.num_classes={own}, which is used. "
                f"Leave num_classes out, or build the module for {num_classes} classes.",
                UserWarning,
                stacklevel=2,
            )
        self.num_classes = num_classes if own is None else own
        self.module = module
        self._loss_fn = loss_fn
        # Default metrics need values even if the model is built on the meta device.
        with counting_from_zero():
            if train_metrics is None:
                train_metrics = self._accuracy("train_metrics")
            if val_metrics is None:
                val_metrics = MetricCollection([CrossEntropy(), self._accuracy("val_metrics")])
        self.train_metrics = train_metrics
        self.val_metrics = val_metrics

    # torch.jit.script compiles by these annotations.
    def forward(self, batch: tuple[Tensor, Any]) -> Tensor:
        """Compute the logits of the inputs of a batch."""
        # TorchScript does not compile the check.
        if not torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]  # missing in torch.jit.__all__
            _refuse_mapping(batch)
        inputs, _ = batch
        return self.module(inputs)

    def loss(self, outputs: Any, batch: tuple[Any, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of logits and the targets of a batch; further arguments go to `loss_fn`."""
        _, targets = batch
        return self._loss_fn(outputs, targets, *args, **kwargs)

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        """Update one metric with the logits and the targets of a batch."""
        _, targets = batch
        metric.update(outputs, targets)

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """Return the metrics of training or of evaluation by class name."""
        return metrics_by_name(self.train_metrics if is_train else self.val_metrics)

    def _accuracy(self, missing: str) -> Metric:
        if self.num_classes is None:
            raise ValueError(
                f"num_classes=None is not enough for the default of {missing}: pass num_classes, or a module that has "
                f"an attribute num_classes, or both train_metrics and val_metrics."
            )
        return MulticlassAccuracy(num_classes=self.num_classes, average="micro")


def _refuse_mapping(batch: Any) -> None:
    # The tuple first, because the check for a mapping is slow.
    if not isinstance(batch, (tuple, list)) and isinstance(batch, Mapping):
        keys = [repr(key) for key in cast("Mapping[Any, Any]", batch)]
        first, second = [*keys, "...", "..."][:2]
        raise TypeError(
            f"the batch must be a tuple (inputs, targets) for ComposerClassifier; got a {type(batch).__name__} with "
            f"the keys {', '.join(keys)}. Use ComposerModel.from_module(module, loss_fn, metrics, input_key={first}, "
            f"target_key={second})."
        )


def composer_timm(
    model_name: str,
    pretrained: bool = False,
    num_classes: int = 1000,
    drop_rate: float = 0.0,
    drop_path_rate: float | None = None,
    drop_block_rate: float | None = None,
    global_pool: str | None = None,
    bn_momentum: float | None = None,
    bn_eps: float | None = None,
    **settings: Any,
) -> ComposerClassifier:
    """Create a classifier from an image model of timm.

    Args:
        model_name: A name in `timm.list_models()`, such as `'resnet50'` or `'vit_small_patch16_224'`.
        pretrained: Whether to download trained weights.
        num_classes: The number of classes.
        drop_rate: Dropout rate before the classifier.
        drop_path_rate: Drop rate of residual blocks.
        drop_block_rate: Drop rate of regions of activations.
        global_pool: Pooling of the features, such as `'avg'`.
        bn_momentum: Momentum of batch norms.
        bn_eps: Epsilon of batch norms.
        settings: Further arguments of the model, such as `img_size` or `in_chans`. Arguments that are `None` are not
            passed to the model, and each model accepts only those that it uses.

    Raises:
        RuntimeError: If timm has no model with this name.
        TypeError: If the model does not accept an argument.
        MissingConditionalImportError: If timm is not installed; the extra `timm` provides it.
    """
    try:
        from timm import create_model  # the extra `timm`
    except ImportError as error:
        raise MissingConditionalImportError("timm", "timm", distribution="composer-models") from error
    module = create_model(
        model_name,
        pretrained=pretrained,
        num_classes=num_classes,
        drop_rate=drop_rate,
        drop_path_rate=drop_path_rate,
        drop_block_rate=drop_block_rate,
        global_pool=global_pool,
        bn_momentum=bn_momentum,
        bn_eps=bn_eps,
        **settings,
    )
    return ComposerClassifier(module, num_classes=num_classes)
