"""Stopping when a metric has reached a threshold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from composer.callbacks._watched_metric import Comparison, MetricStopper
from composer_events.arguments import check_flags, check_numbers

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["ThresholdStopper"]


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
        super().__init__(monitor, dataloader_label, comp)
        check_flags(stop_on_batch=stop_on_batch)
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
