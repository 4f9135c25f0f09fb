"""Callbacks that stop training based on the value of a metric."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from composer_events.arguments import check_numbers, to_time
from composer_events.callback import Callback
from composer_events.metric_entries import higher_is_better, metric_with, number_of, refuse_several
from composer_time import Time, TimeUnit

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["Comparison", "EarlyStopper", "MetricStopper", "ThresholdStopper"]

Comparison = Callable[[Any, Any], Any]

_NAMED: Final[dict[str, Comparison]] = {
    "greater": torch.greater,
    "gt": torch.greater,
    "less": torch.less,
    "lt": torch.less,
}


class MetricStopper(Callback):
    """Base class of callbacks that check a metric after each epoch and evaluation."""

    def __init__(self, monitor: str, dataloader_label: str, comp: str | Comparison | None) -> None:
        self.monitor = monitor
        self.dataloader_label = dataloader_label
        self.stop_reason: str | None = None
        self._goes_by_metric = comp is None
        if isinstance(comp, str):
            if comp.lower() not in _NAMED:
                accepted = ", ".join(map(repr, _NAMED))
                raise ValueError(f"comp={comp!r} must be one of {accepted}, or a function of two values.")
            comp = _NAMED[comp.lower()]
        self.comp: Comparison = _comparison(higher_is_better(monitor)) if comp is None else comp

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check that the metric exists, and choose the comparison.

        Raises:
            ValueError: If the dataloader is known, and has no such metric or the metric has several numbers.
        """
        self.stop_reason = None
        label, labels = self.dataloader_label, [evaluator.label for evaluator in state.evaluators]
        metrics = self._metrics(state)
        # Metrics of a custom loop may not be known yet, so a missing one is an error only for a known dataloader.
        if (label == "train" and state.train_metrics) or (label in labels and label in state.eval_metrics):
            name = self._name_in(metrics)
            refuse_several(name, metrics[name], self.monitor)
        elif label not in ("train", state.dataloader_label, *labels):
            warnings.warn(
                f"dataloader_label={label!r} does not name a dataloader: their labels are "
                f"{', '.join(map(repr, [state.dataloader_label or 'train', *labels]))}, so {self.monitor!r} stops "
                f"nothing. Name one of them.",
                stacklevel=2,
            )
        if self._goes_by_metric:
            is_higher = higher_is_better(self.monitor, metrics.get(metric_with(metrics, self.monitor) or self.monitor))
            if is_higher is None:
                warnings.warn(
                    f"Neither the metric {self.monitor!r} of {label!r} nor its name says whether larger or smaller "
                    f"values are better. Larger is assumed. Pass comp='greater' or comp='less', or give the metric an "
                    f"attribute higher_is_better.",
                    stacklevel=2,
                )
            self.comp = _comparison(is_higher)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Check the metric, if it is that of the dataloader of the event."""
        self._look_if_named(state)

    eval_end = epoch_end

    def _look_if_named(self, state: State) -> None:
        # The state has the label of the dataloader that the current event belongs to.
        if self.dataloader_label == state.dataloader_label:
            metrics = self._metrics(state)
            name = self._name_in(metrics)
            # Read from the device once, rather than in each comparison.
            self._look(state, torch.as_tensor(number_of(name, metrics[name].compute(), self.monitor)).cpu())

    @abstractmethod
    def _look(self, state: State, value: torch.Tensor) -> None:
        """Stop training if the value requires it."""

    def _metrics(self, state: State) -> Mapping[str, Any]:
        if self.dataloader_label == "train" and state.train_metrics:
            return state.train_metrics
        return state.eval_metrics.get(self.dataloader_label, {})

    def _name_in(self, metrics: Mapping[str, Any]) -> str:
        if (name := metric_with(metrics, self.monitor)) is None:
            raise ValueError(
                f"The dataloader labeled {self.dataloader_label!r} has no metric {self.monitor!r}; its metrics are "
                f"{sorted(metrics)}. Name one of them, or the label of an evaluator that has it."
            )
        return name


def _comparison(is_higher_better: bool | None) -> Comparison:
    # If it is unknown which values are better, larger is assumed, as in Composer.
    return torch.less if is_higher_better is False else torch.greater


_BATCH: Final = TimeUnit.BATCH  # looking up an enum member is slow in Python 3.11, and this is needed in each batch
_UNITS: Final = (TimeUnit.EPOCH, _BATCH)


class EarlyStopper(MetricStopper):
    """Stop training when a metric has not improved for some time.

    Args:
        monitor: Name of the metric, such as `'MulticlassAccuracy'`, or of an entry of a metric with several numbers,
            such as `'MAP/map_50'`.
        dataloader_label: `'train'`, or the label of an evaluator.
        comp: Comparison of two values: `'greater'`, `'less'`, or a function of the new and the best value. Default: by
            the metric's own `higher_is_better`, or else by its name; see `composer_events.metric_entries`.
        min_delta: Minimum improvement, exclusive; smaller ones do not count.
        patience: Time without improvement after which training stops: epochs, or a time in epochs (`'3ep'`) or batches
            (`'500ba'`).

    Attributes:
        stop_reason: Why training was stopped, for the run report; `None` if it was not.

    Raises:
        ValueError: If `comp` is an unknown name or `patience` has another unit; at the start of training, if the metric
            does not exist or has several numbers.

    Warns:
        UserWarning: At the start of training, if it is unknown which values are better. Larger is then assumed.

    Example:
        >>> stopper = EarlyStopper('MulticlassAccuracy', 'eval', patience='3ep')

    Reference:
        Prechelt. "Early Stopping - But When?", 1998, doi:10.1007/3-540-49430-8_3.
    """

    def __init__(
        self,
        monitor: str,
        dataloader_label: str,
        comp: str | Comparison | None = None,
        min_delta: float = 0.0,
        patience: int | str | Time[int] = 1,
    ) -> None:
        super().__init__(monitor, dataloader_label, comp)
        check_numbers(min_delta=min_delta)
        self.min_delta = abs(min_delta)
        self.patience = to_time("patience", patience, TimeUnit.EPOCH)
        if self.patience.unit not in _UNITS or int(self.patience) < 0:
            raise ValueError(f"patience={patience!r} must be in epochs or batches, such as '3ep' or '500ba'.")
        self.best: Any = None
        self.best_occurred: Time[int] | None = None

    def batch_end(self, state: State, logger: Logger) -> None:
        """Check the training metric, if patience is in batches."""
        if self.patience.unit is _BATCH:
            self._look_if_named(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and its time."""
        if self.best is None or self.best_occurred is None:
            return {}
        return {"best": float(self.best), "best_occurred": self.best_occurred.to_timestring()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best value and its time."""
        if state:
            self.best, self.best_occurred = state["best"], Time.from_timestring(state["best_occurred"])

    def _look(self, state: State, value: torch.Tensor) -> None:
        now = state.timestamp.get(self.patience.unit)
        # A best time in the future comes from an earlier run, so the comparison starts over.
        if self.best is None or self.best_occurred is None or self.best_occurred > now or self._is_better(value):
            self.best, self.best_occurred = value, now
        elif now - self.best_occurred > self.patience:
            self.stop_reason = (
                f"{self.dataloader_label}/{self.monitor} has not improved on {float(self.best):.6g} since "
                f"{self.best_occurred}"
            )
            state.stop_training()

    def _is_better(self, value: Any) -> bool:
        # From a checkpoint, `best` is a number, and `comp` may need two tensors on one device.
        best = value.new_tensor(self.best) if not hasattr(self.best, "device") else self.best
        if bool(best.isnan()):  # every comparison with NaN is false
            return not bool(value.isnan())
        return bool(self.comp(value, best)) and bool(abs(value - best) > self.min_delta)


class ThresholdStopper(MetricStopper):
    """Stop training when a metric is better than a threshold.

    Args:
        monitor: Name of the metric, such as `'MulticlassAccuracy'`, or of an entry of a metric with several numbers,
            such as `'MAP/map_50'`.
        dataloader_label: `'train'`, or the label of an evaluator.
        threshold: The threshold.
        comp: Comparison of two values: `'greater'`, `'less'`, or a function of the value and the threshold. Default: by
            the metric's own `higher_is_better`, or else by its name; see `composer_events.metric_entries`.
        stop_on_batch: Whether to check after every batch, and not only after epochs and evaluations.

    Attributes:
        stop_reason: Why training was stopped, for the run report; `None` if it was not.

    Raises:
        ValueError: If `comp` is an unknown name; at the start of training, if the metric does not exist or has several
            numbers.

    Warns:
        UserWarning: At the start of training, if it is unknown which values are better. Larger is then assumed.

    Example:
        >>> stopper = ThresholdStopper('MulticlassAccuracy', 'eval', 0.99)
    """

    def __init__(
        self,
        monitor: str,
        dataloader_label: str,
        threshold: float,
        *,
        comp: str | Comparison | None = None,
        stop_on_batch: bool = False,
    ) -> None:
        super().__init__(monitor, dataloader_label, comp)
        if not isinstance(threshold, torch.Tensor):  # a tensor on a device would have to be read for the check
            check_numbers(threshold=threshold)
        self.threshold = threshold
        self.stop_on_batch = stop_on_batch

    def batch_end(self, state: State, logger: Logger) -> None:
        """Check the training metric, with `stop_on_batch`."""
        if self.stop_on_batch:
            self._look_if_named(state)

    def _look(self, state: State, value: torch.Tensor) -> None:
        if self.comp(value, torch.as_tensor(self.threshold, device=value.device)):
            self.stop_reason = (
                f"{self.dataloader_label}/{self.monitor} is {float(value):.6g}, better than the threshold"
            )
            state.stop_training()
