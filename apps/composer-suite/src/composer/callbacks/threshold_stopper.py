"""Stopping when a metric is good enough."""

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
        monitor: Name of the metric, such as `'MulticlassAccuracy'`, or of an entry of one with several numbers, such
            as `'MAP/map_50'`.
        dataloader_label: Whose: `'train'`, or the label of an evaluator.
        threshold: What is good enough.
        comp: Which of two values is better: `'greater'`, `'less'`, or a function of the value and the threshold. By
            default as the metric's own `higher_is_better` says, or else its name: see
            `composer_events.metric_entries`.
        stop_on_batch: Whether to look after every batch, and not only after epochs and evaluations.

    Attributes:
        stop_reason: Why it has ended training, for the run report; `None` while it has not.

    Raises:
        TypeError: If an argument is of another kind.
        ValueError: If `comp` is another word; when training begins, if there is no such metric, or
            it has several numbers.

    Warns:
        UserWarning: When training begins, if nothing says which values are better. Larger ones are taken to be.

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
        """Look whether there will be such a metric."""
        self.stop_reason = None
        check_watched(state, self.monitor, self.dataloader_label)
        if self._goes_by_metric:
            self.comp = comparison_for(state, self.monitor, self.dataloader_label)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Look at the metric of an evaluator."""
        self._look_if_named(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Look at the metric of training."""
        self._look_if_named(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Look at the metric of training, with `stop_on_batch`."""
        if self.stop_on_batch:
            self._look_if_named(state)

    def _look_if_named(self, state: State) -> None:
        if self.dataloader_label == state.dataloader_label:
            value = compute_metric(state, self.monitor, self.dataloader_label)
            if self.comp(value, torch.as_tensor(self.threshold, device=value.device)):
                self.stop_reason = f"{self.dataloader_label}/{self.monitor} is {float(value):.6g}, as good as asked for"
                state.stop_training()
