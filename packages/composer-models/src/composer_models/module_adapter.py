"""A plain module and a loss function, seen as a `ComposerModel`."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from composer_events.batches import batch_get
from composer_models.base import ComposerModel

if TYPE_CHECKING:
    from torchmetrics import Metric

    from composer_models.metrics import Metrics
else:  # for typing.get_type_hints, without torchmetrics, which takes longer to import than torch
    Metric = Metrics = Any

__all__ = ["ModuleAdapter"]


class ModuleAdapter(ComposerModel):
    """What `ComposerModel.from_module` makes; its parameters are described there."""

    def __init__(
        self,
        module: torch.nn.Module,
        loss_fn: Callable[..., Any],
        metrics: "Metrics | None" = None,
        *,
        train_metrics: "Metrics | None" = None,
        input_key: Any = 0,
        target_key: Any = 1,
    ) -> None:
        super().__init__()
        _check_module(module)
        if not callable(loss_fn):
            raise TypeError(f"loss_fn={loss_fn!r} cannot be called: pass a function of outputs and targets.")
        if isinstance(loss_fn, type):
            raise TypeError(
                f"loss_fn={loss_fn!r} is a class, which would take outputs and targets as its settings: pass an "
                f"instance, {loss_fn.__name__}()."
            )
        self.module = module
        self.loss_fn = loss_fn
        # Modules, so that they follow the model to its device where no trainer takes care of them. A ModuleDict could
        # not hold every name: none with a dot in it, nor that of one of its own methods.
        self._train_names, self.train_metrics = _names_and_modules(train_metrics)
        self._val_names, self.val_metrics = _names_and_modules(metrics)
        self.input_key = input_key
        self.target_key = target_key

    def forward(self, batch: Any) -> Any:
        """Call the module with the inputs of a batch."""
        inputs = batch_get(batch, self.input_key)
        if isinstance(inputs, torch.Tensor):  # found out sooner than that it is no mapping
            return self.module(inputs)
        if isinstance(inputs, Mapping):
            return self.module(**cast("Mapping[str, Any]", inputs))
        if isinstance(inputs, tuple):
            return self.module(*cast("tuple[Any, ...]", inputs))
        return self.module(inputs)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Compare outputs with the targets of a batch; further arguments go to the loss function."""
        return self.loss_fn(outputs, batch_get(batch, self.target_key), *args, **kwargs)

    def update_metric(self, batch: Any, outputs: Any, metric: "Metric") -> None:
        """Update one metric with outputs and the targets of a batch."""
        metric.update(outputs, batch_get(batch, self.target_key))

    def get_metrics(self, is_train: bool = False) -> "dict[str, Metric]":
        """Name the metrics of training or of evaluation."""
        names, metrics = (self._train_names, self.train_metrics) if is_train else (self._val_names, self.val_metrics)
        return cast("dict[str, Metric]", dict(zip(names, metrics, strict=True)))


def _names_and_modules(metrics: "Metrics | None") -> tuple[list[str], torch.nn.ModuleList]:
    if metrics is None:
        return [], torch.nn.ModuleList()
    from composer_models.metrics import metrics_by_name  # torchmetrics takes longer to import than torch

    by_name = metrics_by_name(metrics)
    return list(by_name), torch.nn.ModuleList(by_name.values())


def _check_module(module: object) -> None:
    if isinstance(module, ComposerModel):
        raise TypeError(f"module is a {type(module).__name__}, which is a ComposerModel already: use it as it is.")
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module={module!r} is no torch.nn.Module: pass the module, not its class or its output.")
