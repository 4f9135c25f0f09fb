"""Training speed, compared with the peak performance of the device, and an estimate of the remaining time."""

from __future__ import annotations

import re
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from composer_dist import dist
from composer_dist.wrapping import unwrap_model
from composer_events.arguments import check_counts, check_numbers
from composer_events.callback import Callback
from composer_events.logger import log_lazily
from composer_time import TimeUnit

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State
    from composer_time import Time, Timestamp

__all__ = ["GPU_AVAILABLE_FLOPS", "RuntimeEstimator", "SpeedMonitor", "get_gpu_flops_available"]


def _peaks(**flops: float) -> dict[str, float]:
    """Return peaks by precision, with those of 16 and 8 bits also under the names of mixed precisions."""
    return flops | {f"amp_{name}": peak for name, peak in flops.items() if name in ("fp16", "bf16", "fp8")}


_HOPPER_SXM: Final = _peaks(
    fp64=67e12, fp32=67e12, tf32=494.5e12, fp16=989.5e12, bf16=989.5e12, fp8=1.979e15, int8=1.979e15
)
_HOPPER_PCIE: Final = _peaks(
    fp64=51e12, fp32=51e12, tf32=378e12, fp16=756.5e12, bf16=756.5e12, fp8=1.513e15, int8=1.513e15
)

GPU_AVAILABLE_FLOPS: Final[dict[str, dict[str, float]]] = {
    "gb300": _peaks(fp32=80e12, tf32=1.25e15, fp16=2.5e15, bf16=2.5e15, fp8=5e15),
    "gb200": _peaks(fp64=40e12, fp32=80e12, tf32=1.25e15, fp16=2.5e15, bf16=2.5e15, fp8=5e15),
    "b300": _peaks(fp32=75e12, tf32=1.1e15, fp16=2.25e15, bf16=2.25e15, fp8=4.5e15),
    "b200": _peaks(fp64=37e12, fp32=75e12, tf32=1.1e15, fp16=2.25e15, bf16=2.25e15, fp8=4.5e15),
    "b100": _peaks(fp64=30e12, fp32=60e12, tf32=0.9e15, fp16=1.75e15, bf16=1.75e15, fp8=3.5e15),
    "gh200": dict(_HOPPER_SXM),
    "h200-sxm": dict(_HOPPER_SXM),
    "h100-sxm": dict(_HOPPER_SXM),
    "h100-pcie": dict(_HOPPER_PCIE),
    "h100-nvl": _peaks(fp64=30e12, fp32=60e12, tf32=417.5e12, fp16=835e12, bf16=835e12, fp8=1.67e15),
    "h800-pcie": _peaks(fp16=756.5e12, bf16=756.5e12, fp8=1.513e15),
    "h800": _peaks(fp16=989.5e12, bf16=989.5e12, fp8=1.979e15),
    "h20": _peaks(fp32=44e12, tf32=74e12, fp16=148e12, bf16=148e12, fp8=296e12),
    "a100": _peaks(fp64=19.5e12, fp32=19.5e12, tf32=156e12, fp16=312e12, bf16=312e12),
    "a800": _peaks(fp32=19.5e12, tf32=156e12, fp16=312e12, bf16=312e12),
    "rtx-pro-6000-max": _peaks(fp16=438.9e12, bf16=438.9e12),
    "rtx-pro-6000": _peaks(fp32=125e12, fp16=503.8e12, bf16=503.8e12),
    "rtx-6000-ada": _peaks(fp32=91.1e12, tf32=182.1e12, fp16=364.2e12, bf16=364.2e12, fp8=728.5e12),
    "rtx-5090": _peaks(fp32=104.8e12, tf32=104.8e12, fp16=209.5e12, bf16=209.5e12, fp8=419e12, int8=838e12),
    "rtx-4090": _peaks(fp32=82.6e12, tf32=82.6e12, fp16=165.2e12, bf16=165.2e12, fp8=330.3e12, int8=660.6e12),
    "a6000": _peaks(fp32=38.7e12, fp16=154.85e12, bf16=154.85e12),
    "a40": _peaks(fp32=37.4e12, fp16=149.7e12, bf16=149.7e12),
    "a30": _peaks(fp64=10.3e12, fp32=10.3e12, tf32=82e12, fp16=165e12, bf16=165e12),
    "a10": _peaks(fp32=31.2e12, tf32=62.5e12, fp16=125e12, bf16=125e12),
    "l40s": _peaks(fp32=91.6e12, tf32=183e12, fp16=362e12, bf16=362e12, fp8=733e12),
    "l40": _peaks(fp32=90.5e12, tf32=90.5e12, fp16=181e12, bf16=181e12, fp8=362e12),
    "l20": _peaks(fp32=59.8e12, fp16=119.5e12, bf16=119.5e12, fp8=239e12),
    "l4": _peaks(fp32=30.3e12, tf32=60e12, fp16=121e12, bf16=121e12, fp8=242e12),
    "v100-sxm": _peaks(fp64=7.8e12, fp32=15.7e12, fp16=125e12),
    "v100-pcie": _peaks(fp64=7e12, fp32=14e12, fp16=112e12),
    "v100s-pcie": _peaks(fp64=8.2e12, fp32=16.4e12, fp16=130e12),
    "t4": _peaks(fp32=8.1e12, fp16=65e12, int8=130e12, int4=260e12),
    "mi355x": _peaks(fp16=2.5e15, bf16=2.5e15, fp8=5e15),
    "mi350x": _peaks(fp16=2.3e15, bf16=2.3e15, fp8=4.6e15),
    "mi325x": _peaks(fp32=163.4e12, fp16=1.3e15, bf16=1.3e15, fp8=2.61e15),
    "mi300x": _peaks(fp32=163.4e12, fp16=1.3e15, bf16=1.3e15, fp8=2.61e15),
    "mi300a": _peaks(fp32=122.6e12, fp16=980.6e12, bf16=980.6e12, fp8=1.96e15),
    "mi250x": _peaks(fp16=191.5e12, bf16=191.5e12),
    "trn1": _peaks(fp32=23.75e12, tf32=23.75e12, fp16=95e12, bf16=95e12, int8=190e12),
}
"""Peak floating point operations per second, without sparsity, by device and precision, as published by the vendors.

A device matches a key whose words are in its name, such as `GPU_AVAILABLE_FLOPS['rtx-3090'] = {'amp_bf16': 7.1e13}`.
"""

# Words in drivers' names that imply the form factor: among H100s, HBM3 implies SXM, and HBM2e implies PCIe.
_ALSO: Final = {"hbm3": "sxm", "hbm2e": "pcie", "h200": "sxm"}


def get_gpu_flops_available(state: State) -> float:
    """Return the peak performance of one device of this run, in floating point operations per second.

    Args:
        state: Determines the precision.

    Returns:
        The peak without sparsity; 0.0 without a GPU, and, with a warning, for a GPU or precision that is not in
        `GPU_AVAILABLE_FLOPS`.
    """
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    elif state.device.name == "neuron":
        name = "trn1"
    else:
        return 0.0
    precision = str(state.precision.value)
    key = find_device(name)
    if key is None or precision not in GPU_AVAILABLE_FLOPS[key]:
        warnings.warn(
            f"The peak performance of device {name!r} in precision {precision!r} is unknown, so model FLOPs "
            "utilization is not logged. Give SpeedMonitor(gpu_flops_available=...), in floating point operations a "
            "second.",
            stacklevel=2,
        )
        return 0.0
    return GPU_AVAILABLE_FLOPS[key][precision]


def find_device(name: str) -> str | None:
    """Return the key of the device with a driver's name, or `None` if it is unknown.

    >>> find_device("NVIDIA H100 80GB HBM3")
    'h100-sxm'
    """
    said = re.findall(r"[a-z0-9]+", name.lower())
    said += [_ALSO[word] for word in said if word in _ALSO]
    for key in sorted(GPU_AVAILABLE_FLOPS, key=len, reverse=True):  # longest first: "a100" before "a10"
        if all(any(_begins_with(word, part) for word in said) for part in re.split(r"[-\s]", key.lower())):
            return key
    return None


def _begins_with(word: str, part: str) -> bool:
    """Return whether a word is the part or a variant of it: an A10G is an A10, but an A1000 is not."""
    return word.startswith(part) and not (part[-1].isdigit() and word[len(part) :][:1].isdigit())


_SECONDS: Final = {"seconds": 1, "minutes": 60, "hours": 60 * 60, "days": 24 * 60 * 60}


def seconds_per(time_unit: str) -> int:
    """Return the length of a time unit in seconds."""
    if time_unit not in tuple(_SECONDS):  # a tuple can also be searched for values that are not hashable
        raise ValueError(f"time_unit={time_unit!r} must be one of {', '.join(map(repr, _SECONDS))}.")
    return _SECONDS[time_unit]


class SpeedMonitor(Callback):
    """Log the training speed over a window of the last batches.

    | metric | meaning |
    |---|---|
    | `throughput/batches_per_sec`, `throughput/samples_per_sec` | of all ranks together |
    | `throughput/tokens_per_sec` | the same, if batches have tokens |
    | `throughput/packing_efficiency` | the share of packed windows that tokens fill, if batches have `position_ids` |
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
        self.fit_end(state, logger)
        if self.history_wct and state.timestamp.total_wct.total_seconds() < self.history_wct[-1]:
            self._forget()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Release the model."""
        self._model = self._flops_per_batch = None

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
        window = seconds[0], self.history_samples[0], self.history_tokens[0], len(seconds), _packed_size(state.batch)
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

    def _forget(self) -> None:
        for history in (self.history_samples, self.history_tokens, self.history_wct, self.history_flops):
            history.clear()
        self.total_eval_wct = 0.0

    def _speed(
        self, now: Timestamp, eval_s: float, start_s: float, start_sample: int, start_token: int, length: int, size: int
    ) -> dict[str, float]:
        """Return the metrics at a timestamp, for a window with the given start and length, of samples of a size."""
        train_s = now.total_wct.total_seconds()
        metrics: dict[str, float] = {}
        # Logged only for a full window, and if the clock has advanced.
        if length > self._window_size and train_s > start_s:
            seconds, tokens = train_s - start_s, now.num_tokens - start_token
            rates = {"batches_per_sec": self._window_size / seconds}
            rates["samples_per_sec"] = (now.num_samples - start_sample) / seconds
            if tokens > 0:
                rates["tokens_per_sec"] = tokens / seconds
            metrics = {f"throughput/{name}": rate for name, rate in rates.items()}
            metrics |= {f"throughput/device/{name}": rate / self._world_size for name, rate in rates.items()}
            # More tokens than places: an algorithm has shortened the sequences after they were counted.
            if 0 < tokens <= (places := (now.num_samples - start_sample) * size):
                metrics["throughput/packing_efficiency"] = tokens / places
        metrics["time/train"] = train_s / self._seconds
        metrics["time/val"] = eval_s / self._seconds
        metrics["time/total"] = (train_s + eval_s) / self._seconds
        return metrics

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


def _packed_size(batch: Any) -> int:
    """Return the number of tokens in a packed sample, or 0 for other batches."""
    positions = batch.get("position_ids") if isinstance(batch, dict) else None  # pyright: ignore[reportUnknownMemberType]
    return positions.shape[1] if isinstance(positions, torch.Tensor) and positions.ndim == 2 else 0


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


class RuntimeEstimator(Callback):
    """Log the remaining time of training, including evaluations, as `time/remaining_estimate` after each batch.

    Args:
        skip_batches: Number of batches to skip at the start, which are slower than later ones.
        time_unit: `'seconds'`, `'minutes'`, `'hours'` or `'days'`.

    Raises:
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
