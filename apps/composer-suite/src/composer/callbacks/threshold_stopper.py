"""Stopping when a metric has reached a threshold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from composer.callbacks._watched_metric import (
    Comparison,
    check_watched,
    choose_comparison,
    comparison_for,
    compute_metric,
)
from composer_events.arguments import check_flags, check_numbers, check_texts
from composer_events.callback import Callback

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["ThresholdStopper"]


class ThresholdStopper(Callback):
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
        TypeError: If an argument has the wrong type.
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
        check_texts(dataloader_label=dataloader_label)
        check_flags(stop_on_batch=stop_on_batch)
        if not isinstance(threshold, torch.Tensor):
            check_numbers(threshold=threshold)
        self.monitor = monitor
        self.dataloader_label = dataloader_label
        self.threshold = threshold
        self.comp = choose_comparison(comp, monitor)
        self._goes_by_metric = comp is None
        self.stop_on_batch = stop_on_batch
        self.stop_reason: str | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check that the metric exists, and choose the comparison."""
        self.stop_reason = None
        check_watched(state, self.monitor, self.dataloader_label)
        if self._goes_by_metric:
            self.comp = comparison_for(state, self.monitor, self.dataloader_label)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Check the metric of an evaluator."""
        self._look_if_named(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Check the metric of training."""
        self._look_if_named(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Check the metric of training, with `stop_on_batch`."""
        if self.stop_on_batch:
            self._look_if_named(state)

    def _look_if_named(self, state: State) -> None:
        # The label in the state tells which dataloader the current event belongs to.
        if self.dataloader_label == state.dataloader_label:
            value = compute_metric(state, self.monitor, self.dataloader_label)
            if self.comp(value, torch.as_tensor(self.threshold, device=value.device)):
                self.stop_reason = f"{self.dataloader_label}/{self.monitor} is {float(value):.6g}, as good as asked for"
                state.stop_training()
