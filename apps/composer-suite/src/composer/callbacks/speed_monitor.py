"""Training speed: batches, samples, tokens and floating point operations per second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from composer.callbacks.device_flops import GPU_AVAILABLE_FLOPS, get_gpu_flops_available
from composer_dist import dist
from composer_dist.wrapping import unwrap_model
from composer_events.arguments import check_counts, check_numbers
from composer_events.callback import Callback
from composer_events.logger import log_lazily

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State
    from composer_time import Timestamp

__all__ = ["GPU_AVAILABLE_FLOPS", "SpeedMonitor", "get_gpu_flops_available"]

_SECONDS: Final = {"seconds": 1, "minutes": 60, "hours": 60 * 60, "days": 24 * 60 * 60}


def seconds_per(time_unit: str) -> int:
    """Return the length of a time unit in seconds.

    Raises:
        ValueError: If the unit is unknown.
    """
    if time_unit not in tuple(_SECONDS):  # a tuple can also be searched for values that are not hashable
        raise ValueError(f"time_unit={time_unit!r} must be one of {', '.join(map(repr, _SECONDS))}.")
    return _SECONDS[time_unit]


class SpeedMonitor(Callback):
    """Log the training speed over a window of the last batches.

    | metric | meaning |
    |---|---|
    | `throughput/batches_per_sec`, `throughput/samples_per_sec` | of all ranks together |
    | `throughput/tokens_per_sec` | the same, if batches have tokens |
    | `throughput/flops_per_sec` | if the model has `flops_per_batch(batch)`, which returns the FLOPs of a batch |
    | `throughput/device/...` | each of these, divided by the number of ranks |
    | `throughput/device/mfu` | model FLOPs utilization: the fraction of the device's peak performance |
    | `time/train`, `time/val`, `time/total` | elapsed time |

    Args:
        window_size: Number of batches to average over; until they have passed, only times are logged.
        gpu_flops_available: Peak performance of one device, in floating point operations per second. Default: looked up
            in `GPU_AVAILABLE_FLOPS`.
        time_unit: `'seconds'`, `'minutes'`, `'hours'` or `'days'`, for the metrics that start with `time/`.

    Raises:
        ValueError: If the window is not positive or the unit is unknown.
        TypeError: If an argument has the wrong type; at the first batch, if the model's `flops_per_batch` is not a
            function or does not return a number.

    Example:
        >>> monitor = SpeedMonitor(window_size=100)

    Reference:
        Model FLOPs utilization: Chowdhery et al. "PaLM: Scaling Language Modeling with Pathways", 2022,
        arXiv:2204.02311.
    """

    def __init__(
        self, window_size: int = 100, gpu_flops_available: float | None = None, time_unit: str = "hours"
    ) -> None:
        check_counts(window_size=window_size)
        window_size = int(window_size)  # `deque` rejects NumPy integers
        if gpu_flops_available is not None:
            check_numbers(0, gpu_flops_available=gpu_flops_available)
        # A window of n batches has n + 1 boundaries.
        self.history_samples: deque[int] = deque(maxlen=window_size + 1)
        self.history_tokens: deque[int] = deque(maxlen=window_size + 1)
        self.history_wct: deque[float] = deque(maxlen=window_size + 1)
        self.history_flops: deque[Any] = deque(maxlen=window_size + 1)
        self.gpu_flops_available = gpu_flops_available
        self.total_eval_wct = 0.0
        self._window_size = window_size
        self._seconds = seconds_per(time_unit)
        self._world_size = 1
        self._model: torch.nn.Module | None = None
        self._flops_per_batch: Callable[[Any], float] | None = None

    def init(self, state: State, logger: Logger) -> None:
        """Look up the peak performance and the number of devices."""
        # Stored, since `batch_end` runs in each step.
        self._world_size = dist.get_world_size()
        if self.gpu_flops_available is None:
            self.gpu_flops_available = get_gpu_flops_available(state)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Release the model, and reset the history if the time in training has gone back."""
        self._let_go()
        if self.history_wct and state.timestamp.total_wct.total_seconds() < self.history_wct[-1]:
            self._forget()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Release the model."""
        self._let_go()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the speed over the window that ends with this batch."""
        now, seconds = state.timestamp, self.history_wct
        train_s = now.total_wct.total_seconds()
        if seconds and train_s < seconds[-1]:  # an earlier checkpoint was loaded
            self._forget()
        self.history_samples.append(now.num_samples)
        self.history_tokens.append(now.num_tokens)
        seconds.append(train_s)
        if self._model is not state.model:  # cached, since looking up a missing attribute of a module is slow
            self._model, self._flops_per_batch = state.model, _flops_function(state.model)
        # Numbers, since a lazy log may be computed after the next batches have changed the history.
        window = seconds[0], self.history_samples[0], self.history_tokens[0], len(seconds)
        if self._flops_per_batch is None:
            log_lazily(state, logger, self._speed, self.total_eval_wct, *window)
        else:
            flops = self._flops(self._flops_per_batch(state.batch), state)
            logger.log_metrics(flops | self._speed(now, self.total_eval_wct, *window))

    def eval_end(self, state: State, logger: Logger) -> None:
        """Add the duration of the evaluation."""
        self.total_eval_wct += state.eval_timestamp.total_wct.total_seconds()

    def state_dict(self) -> dict[str, Any]:
        """Return the time spent on evaluation, in seconds."""
        return {"total_eval_wct": self.total_eval_wct}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the time spent on evaluation."""
        self.total_eval_wct = state["total_eval_wct"]

    def _let_go(self) -> None:
        self._model = self._flops_per_batch = None

    def _forget(self) -> None:
        """Clear the history after the time in training has gone back."""
        for history in (self.history_samples, self.history_tokens, self.history_wct, self.history_flops):
            history.clear()
        self.total_eval_wct = 0.0

    def _speed(
        self, now: Timestamp, eval_s: float, start_s: float, start_sample: int, start_token: int, length: int
    ) -> dict[str, float]:
        """Return the metrics at a timestamp, for a window with the given start and length."""
        train_s = now.total_wct.total_seconds()
        metrics: dict[str, float] = {}
        # Logged only for a full window, and if the clock has advanced.
        if length > self._window_size and train_s > start_s:
            metrics = self._throughput(train_s - start_s, now.num_samples - start_sample, now.num_tokens - start_token)
        metrics["time/train"] = train_s / self._seconds
        metrics["time/val"] = eval_s / self._seconds
        metrics["time/total"] = (train_s + eval_s) / self._seconds
        return metrics

    def _throughput(self, seconds: float, samples: int, tokens: int) -> dict[str, float]:
        rates = {"batches_per_sec": self._window_size / seconds, "samples_per_sec": samples / seconds}
        if tokens > 0:
            rates["tokens_per_sec"] = tokens / seconds
        of_all = {f"throughput/{name}": rate for name, rate in rates.items()}
        return of_all | {f"throughput/device/{name}": rate / self._world_size for name, rate in rates.items()}

    def _flops(self, of_batch: Any, state: State) -> dict[str, Any]:
        try:
            of_batch = float(of_batch)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"flops_per_batch returned {of_batch!r} for a batch, but must return its number of floating-point "
                f"operations."
            ) from error
        # Cumulative, like the other histories, so that the first and the last entry give the window.
        so_far = self.history_flops[-1] if self.history_flops else 0.0
        self.history_flops.append(so_far + _over_all_ranks(of_batch, state))
        seconds = self.history_wct[-1] - self.history_wct[0]
        if len(self.history_flops) < (self.history_flops.maxlen or 0) or seconds <= 0:
            return {}
        flops = (self.history_flops[-1] - self.history_flops[0]) / seconds
        metrics = {"throughput/flops_per_sec": flops, "throughput/device/flops_per_sec": flops / self._world_size}
        if self.gpu_flops_available:
            metrics["throughput/device/mfu"] = flops / self._world_size / self.gpu_flops_available
        return metrics


def _flops_function(model: Any) -> Callable[[Any], float] | None:
    """Return the model's `flops_per_batch`, or `None` if it has none."""
    model = unwrap_model(model)
    flops_per_batch: Any = getattr(model, "flops_per_batch", None)
    if flops_per_batch is not None and not callable(flops_per_batch):
        raise TypeError(
            f"flops_per_batch={flops_per_batch!r} of {type(model).__name__} must be a function of a batch that returns "
            "its number of floating-point operations."
        )
    return cast("Callable[[Any], float] | None", flops_per_batch)


def _over_all_ranks(flops: float, state: State) -> Any:
    if dist.get_world_size() == 1:
        return flops
    total = state.device.tensor_to_device(torch.tensor(flops, dtype=torch.float64))
    dist.all_reduce(total)
    return total  # a tensor on the device, since reading it would synchronize
