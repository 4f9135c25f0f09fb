"""Stopping when a metric no longer improves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from composer.callbacks._watched_metric import Comparison, MetricStopper
from composer_events.arguments import check_numbers, to_time
from composer_time import Time, TimeUnit

if TYPE_CHECKING:
    import torch

    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["EarlyStopper"]

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
        TypeError: If an argument has the wrong type.
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
