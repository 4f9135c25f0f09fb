"""Estimate of the remaining training time."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer.callbacks.speed_monitor import seconds_per
from composer_events.arguments import check_counts
from composer_events.callback import Callback
from composer_events.logger import log_lazily
from composer_time import TimeUnit

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State
    from composer_time import Time, Timestamp

__all__ = ["RuntimeEstimator"]


class RuntimeEstimator(Callback):
    """Log the remaining time of training, including evaluations, as `time/remaining_estimate` after each batch.

    Args:
        skip_batches: Number of batches to skip at the start, which are slower than later ones.
        time_unit: `'seconds'`, `'minutes'`, `'hours'` or `'days'`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the unit is unknown, or `skip_batches` is negative.

    Example:
        >>> estimator = RuntimeEstimator(time_unit='minutes')
    """

    def __init__(self, skip_batches: int = 1, time_unit: str = "hours") -> None:
        check_counts(0, skip_batches=skip_batches)
        self.time_unit = time_unit
        self._seconds = seconds_per(time_unit)
        self.eval_frequency_per_label: dict[str, float] = {}
        self._evaluations: dict[str, _Evaluations] = {}
        self._skip_batches = self._batches_left_to_skip = skip_batches
        self._start_s: float | None = None
        self._start_fraction = 0.0
        self._epoch_length: int | None = None
        self._is_enabled = True

    def init(self, state: State, logger: Logger) -> None:
        """Log the unit of the estimate."""
        logger.log_hyperparameters({"time/remaining_estimate_unit": self.time_unit})

    def fit_start(self, state: State, logger: Logger) -> None:
        """Reset the estimate, since the speed of an earlier `fit` does not apply to this one."""
        self.eval_frequency_per_label.clear()
        self._evaluations.clear()
        self._batches_left_to_skip = self._skip_batches
        self._start_s = None
        self._is_enabled = True

    def batch_start(self, state: State, logger: Logger) -> None:
        """Start the clock after the skipped batches."""
        if not self._is_enabled or self._start_s is not None:
            return
        if self._batches_left_to_skip > 0:
            self._batches_left_to_skip -= 1
            return
        if state.max_duration is None:
            warnings.warn("max_duration is not set, so the remaining training time is unknown.", stacklevel=2)
            self._is_enabled = False
            return
        self._epoch_length = None if state.dataloader_len is None else int(state.dataloader_len)
        self._start_fraction = self._fraction(state) or 0.0
        # Unlike the time of day, the monotonic clock is never set back.
        self._start_s = time.monotonic()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the estimate."""
        if self._start_s is None:
            return
        train_s, remaining_eval_s = time.monotonic() - self._start_s, 0.0
        if self._evaluations:
            # Evaluations are estimated separately, since their number does not follow the batches.
            train_s -= sum(each.total_s for each in self._evaluations.values())
            remaining_eval_s = self._remaining_eval_s()
        duration, length, start = state.max_duration, self._epoch_length, self._start_fraction
        log_lazily(state, logger, self._estimate, duration, length, start, train_s, remaining_eval_s)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Record the duration and frequency of an evaluation."""
        label = state.dataloader_label
        fraction = None if self._start_s is None else self._fraction(state)
        if fraction is None or label is None:
            return
        done = self._evaluations.setdefault(label, _Evaluations())
        done.add(state.eval_timestamp.total_wct.total_seconds())
        self.eval_frequency_per_label[label] = max(fraction - self._start_fraction, 0.0) / done.count

    def _estimate(
        self,
        now: Timestamp,
        max_duration: Time[Any] | None,
        epoch_length: int | None,
        start_fraction: float,
        train_s: float,
        remaining_eval_s: float,
    ) -> dict[str, float]:
        fraction = _elapsed_fraction(now, max_duration, epoch_length)
        if fraction is None or fraction <= start_fraction:
            return {}
        # The fraction since the clock was started, which is later than the start of training.
        remaining_s = train_s / (fraction - start_fraction) * (1 - fraction) + remaining_eval_s
        return {"time/remaining_estimate": max(remaining_s, 0.0) / self._seconds}

    def _remaining_eval_s(self) -> float:
        remaining_s = 0.0
        for label, frequency in self.eval_frequency_per_label.items():
            done = self._evaluations[label]
            if frequency > 0:
                remaining_s += done.mean_s * max((1 - self._start_fraction) / frequency - done.count, 0.0)
        return remaining_s

    def _fraction(self, state: State) -> float | None:
        return _elapsed_fraction(state.timestamp, state.max_duration, self._epoch_length)


def _elapsed_fraction(now: Timestamp, max_duration: Time[Any] | None, epoch_length: int | None) -> float | None:
    """Return the elapsed fraction of training, also within an epoch if its length is known."""
    if max_duration is None:
        return None
    unit, length = max_duration.unit, max_duration.value
    if length == 0:
        return 1.0
    if unit is TimeUnit.EPOCH:
        batch, epochs = now.num_batches, now.num_epochs
        # Epochs may differ in length, so the mean of completed epochs is used.
        mean_length = (batch - now.num_batches_in_epoch) / epochs if epochs else epoch_length
        if mean_length:
            return min(batch / (length * mean_length), 1.0)
    return now.get(unit).value / length


@dataclass(slots=True)
class _Evaluations:
    """Number and durations of evaluations, in constant memory."""

    count: int = 0
    first_s: float = 0.0
    total_s: float = 0.0

    def add(self, duration_s: float) -> None:
        if self.count == 0:
            self.first_s = duration_s
        self.count += 1
        self.total_s += duration_s

    @property
    def mean_s(self) -> float:
        """The mean duration, without the first evaluation, which is slower, unless it is the only one."""
        if self.count < 2:
            return self.total_s
        return (self.total_s - self.first_s) / (self.count - 1)
