"""Metrics of the training batches, computed from what the model already put out."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from composer.trainer._autocast import Autocast
from composer.trainer._blame import in_stage
from composer_events.state import State
from composer_models import ComposerModel, model_eval_mode


class TrainMetrics:
    """Updates `state.train_metrics` with each microbatch as it was before an algorithm changed it.

    A model without train metrics costs nothing here.
    """

    def __init__(self, state: State, model: ComposerModel) -> None:
        self._state = state
        self._model = model
        self._kept: Any = None
        # Without an own eval_forward the outputs are taken as they are, so there is no mode to switch.
        self._reuses_outputs = type(model).eval_forward is ComposerModel.eval_forward

    def reset(self) -> None:
        """Start anew, for another batch."""
        if metrics := self._state.train_metrics:
            for metric in metrics.values():
                metric.reset()

    def keep(self, microbatch: Any) -> None:
        """Remember a microbatch whose containers algorithms are free to change from now on."""
        if self._state.train_metrics:
            self._kept = _copy_containers(microbatch)

    @in_stage("the metrics of training")
    def update(self, outputs: Any, autocast: Autocast) -> None:
        """Show the remembered microbatch and the model's outputs to every metric, in the precision of training."""
        metrics = self._state.train_metrics
        if not metrics:
            return
        mode: AbstractContextManager[Any] = nullcontext() if self._reuses_outputs else model_eval_mode(self._model)
        with torch.no_grad(), mode, autocast():
            outputs = self._model.eval_forward(self._kept, outputs)
            for metric in metrics.values():
                self._model.update_metric(self._kept, outputs, metric)
        self._kept = None

    def compute(self) -> dict[str, Any]:
        """Return the value of each metric over the microbatches seen, and put them on the state.

        A run that was resumed right at the end of an epoch has seen none yet.
        """
        values = {
            name: metric.compute()
            for name, metric in (self._state.train_metrics or {}).items()
            if getattr(metric, "update_called", True)  # what torchmetrics says of its own
        }
        self._state.train_metric_values.update(values)
        return values


def _copy_containers(batch: Any) -> Any:
    """Copy the dicts, lists and tuples of a batch, with the very same tensors in them."""
    if isinstance(batch, Mapping):
        return {key: _copy_containers(value) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_copy_containers(value) for value in batch)
    return batch
