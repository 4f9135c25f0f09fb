"""Logging of the accelerator's memory and of the machine's load."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import torch

from composer.loggers._service_queue import require, warn_logging_problem
from composer_dist import dist
from composer_events.arguments import check_counts
from composer_events.callback import Callback
from composer_events.logger import log_lazily

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State
    from composer_time import Timestamp

__all__ = ["MemoryMonitor", "SystemMetricsMonitor", "reduce_value"]

_GIGABYTE: Final = 1e9
_DIGITS: Final = 5  # significant digits, which keep logs short

_NAMES: Final = {
    "allocated_bytes.all.current": "current_allocated_mem",
    "active_bytes.all.current": "current_active_mem",
    "inactive_split_bytes.all.current": "current_inactive_mem",
    "reserved_bytes.all.current": "current_reserved_mem",
    "allocated_bytes.all.peak": "peak_allocated_mem",
    "active_bytes.all.peak": "peak_active_mem",
    "inactive_split_bytes.all.peak": "peak_inactive_mem",
    "reserved_bytes.all.peak": "peak_reserved_mem",
    "num_alloc_retries": "alloc_retries",
}


class MemoryMonitor(Callback):
    """Log the memory usage of the accelerator as `memory/<name>`, in gigabytes of 10^9 bytes.

    Args:
        memory_keys: Names to log for entries of `torch.accelerator.memory_stats()`. Default: allocated, active,
            inactive and reserved memory, current and peak, and the number of retries of the allocator.
        dist_aggregate_batch_interval: Interval in batches at which to also log the mean, minimum and maximum over all
            ranks, under names that end in `_avg`, `_min` and `_max`. Default: never.

    Raises:
        ValueError: If the interval is not positive.

    Example:
        >>> monitor = MemoryMonitor(memory_keys={'allocated_bytes.all.peak': 'peak_allocated_mem'})
    """

    def __init__(
        self, memory_keys: Mapping[str, str] | None = None, dist_aggregate_batch_interval: int | None = None
    ) -> None:
        if dist_aggregate_batch_interval is not None:
            check_counts(dist_aggregate_batch_interval=dist_aggregate_batch_interval)
        self.memory_keys = dict(_NAMES if memory_keys is None else memory_keys)
        self.dist_aggregate_batch_interval = dist_aggregate_batch_interval

    def init(self, state: State, logger: Logger) -> None:
        """Warn if training does not run on an accelerator with memory statistics."""
        # Not where the parameters are: FSDP and DeepSpeed move them to the device later, or never.
        device = state.device.torch_device
        if not _has_statistics(device):
            message = f"The memory monitor only works on CUDA devices, but the model is on {device.type}."
            warnings.warn(message, UserWarning, stacklevel=2)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Log the memory usage before the optimizer step."""
        device = state.device.torch_device
        if not _has_statistics(device):
            return
        report: dict[str, Any] = self._report()
        interval = self.dist_aggregate_batch_interval
        if interval is not None and state.timestamp.num_batches % interval == 0:
            report |= _over_all_ranks(report, device)
        logger.log_metrics({f"memory/{name}": value for name, value in report.items()})

    def _report(self) -> dict[str, float]:
        stats = torch.accelerator.memory_stats()
        report: dict[str, float] = {}
        for key, name in self.memory_keys.items():
            if key in stats:
                is_size = "bytes" in key
                value = stats[key] / _GIGABYTE if is_size else stats[key]
                report[name.replace("bytes", "gigabytes")] = float(f"{value:.{_DIGITS}g}") if is_size else value
        return report


def _has_statistics(device: torch.device) -> bool:
    return hasattr(getattr(torch, device.type, None), "memory_stats")


def _over_all_ranks(report: Mapping[str, float], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the mean, minimum and maximum of each value as device tensors, with two collectives."""
    # float64, since float32 cannot represent large byte counts exactly.
    on_host = torch.tensor(list(report.values()), dtype=torch.float64)
    values = on_host.to(device, non_blocking=True)
    total, extremes = values.clone(), torch.stack([-values, values])
    dist.all_reduce(total, reduce_operation="SUM")
    dist.all_reduce(extremes, reduce_operation="MAX")
    reduced = {"avg": total / dist.get_world_size(), "min": -extremes[0], "max": extremes[1]}
    return {
        f"{name}_{ending}": value
        for ending, values in reduced.items()
        for name, value in zip(report, values.unbind(), strict=True)
    }


def reduce_value(value: float, device: torch.device, op: str = "mean") -> float:
    """Return the mean, sum, minimum or maximum of a number over all ranks. Every rank must call this.

    Args:
        value: Value of this rank.
        device: Device on which the ranks communicate.
        op: `'mean'` or `'avg'`, `'sum'`, `'min'` or `'max'`.

    Raises:
        ValueError: If `op` is unknown.
    """
    operations = {"mean": "SUM", "avg": "SUM", "sum": "SUM", "min": "MIN", "max": "MAX"}
    if op not in operations:
        raise ValueError(f"op={op!r} must be one of {', '.join(map(repr, operations))}.")
    tensor = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, reduce_operation=operations[op])
    return float(tensor) / (dist.get_world_size() if op in ("mean", "avg") else 1)


_FRESH_S: Final = 1.0  # seconds between readings; drivers average over about as long


class SystemMetricsMonitor(Callback):
    """Log the system load at the start of each batch of training, evaluation or prediction.

    | metric | meaning |
    |---|---|
    | `cpu_percentage` | CPU utilization |
    | `cpu_memory_<field>`, `disk_memory_<field>` | bytes and percent of memory and of the disk with the root folder |
    | `network_<field>` | bytes, packets and errors since boot |
    | `min_<key>_rank_<r>`, `max_<key>_rank_<r>` | minimum and maximum over all ranks, with the rank |

    The keys in the last row are `gpu_percentage`, `memory_percentage`, `gpu_temperature_C` and `gpu_power_usage_W`, for
    NVIDIA GPUs. The other metrics describe this rank's machine. A separate thread reads the load once a second, and the
    latest reading is logged, so that no batch waits for a driver or a disk. With GPUs, each batch has a collective
    between the CPUs of all ranks. This callback needs the extra `system`.

    Args:
        log_all_data: Whether to log the values of all ranks, as `<key>_rank_<r>`, instead of the minimum and maximum.

    Raises:
        MissingConditionalImportError: If psutil is not installed, or nvidia-ml-py if there are GPUs.
    """

    def __init__(self, log_all_data: bool = False) -> None:
        self.log_all_data = log_all_data
        self._look_for_machine()

    def batch_start(self, state: State, logger: Logger) -> None:
        """Log the latest reading."""
        of_host, of_gpu = self._machine.latest()
        if self._has_gpu:
            # A new dict, since the same reading may be logged again.
            of_host = of_host | _named_by_rank(dist.all_gather_object(of_gpu), self.log_all_data)
        log_lazily(state, logger, _copy, of_host)

    eval_batch_start = predict_batch_start = batch_start

    def close(self, state: State, logger: Logger) -> None:
        """Stop reading."""
        self._machine.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the readers: their thread and handles belong to this process and machine."""
        return {name: value for name, value in vars(self).items() if name not in ("_machine", "_has_gpu")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._look_for_machine()

    def _look_for_machine(self) -> None:
        # nvidia-ml-py does not support AMD GPUs, which PyTorch also reports as CUDA devices.
        self._has_gpu = torch.cuda.is_available() and torch.version.hip is None
        host, gpu = HostReader(), GPUReader() if self._has_gpu else None

        # No method, since the reading thread must not keep the callback alive.
        def read() -> tuple[dict[str, float], dict[str, float]]:
            return host.read(), {} if gpu is None else gpu.read()

        self._machine = BackgroundReader("The machine's load", read, _FRESH_S)


def _copy(now: Timestamp, numbers: dict[str, float]) -> dict[str, float]:
    del now  # `log_lazily` passes the timestamp
    return dict(numbers)


def _named_by_rank(of_ranks: Sequence[dict[str, float]], log_all_data: bool) -> dict[str, float]:
    """Return each rank's GPU load, or its minimum and maximum, under names with the rank.

    >>> _named_by_rank([{"gpu_percentage": 80}, {"gpu_percentage": 30}], log_all_data=False)
    {'min_gpu_percentage_rank_1': 30, 'max_gpu_percentage_rank_0': 80}
    """
    named: dict[str, float] = {}
    for key in GPU_KEYS:
        values = {rank: numbers[key] for rank, numbers in enumerate(of_ranks) if key in numbers}
        if log_all_data:
            named |= {f"{key}_rank_{rank}": value for rank, value in values.items()}
        elif values:
            least, most = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
            named |= {f"min_{key}_rank_{least}": values[least], f"max_{key}_rank_{most}": values[most]}
    return named


GPU_KEYS: Final = ("gpu_percentage", "memory_percentage", "gpu_temperature_C", "gpu_power_usage_W")


class HostReader:
    """Reader of the load of the whole machine."""

    def __init__(self) -> None:
        self._psutil = require("psutil", extra="system")
        self._psutil.cpu_percent()  # the next call measures since this one

    def read(self) -> dict[str, float]:
        """Return percentages, and bytes and counts since boot."""
        psutil = self._psutil
        numbers: dict[str, float] = {"cpu_percentage": psutil.cpu_percent()}
        groups = {
            "cpu_memory": psutil.virtual_memory(),
            "disk_memory": psutil.disk_usage(os.sep),
            "network": psutil.net_io_counters(),
        }
        for group, values in groups.items():
            if values is not None:  # a machine without a network
                numbers |= {f"{group}_{name}": value for name, value in values._asdict().items()}
        return numbers


class GPUReader:
    """Reader of the load of this rank's GPU, through its driver, without synchronization."""

    def __init__(self) -> None:
        self._nvml: Any = require("pynvml", extra="system", package="nvidia-ml-py")
        self._nvml.nvmlInit()
        self._handle: Any = None

    def read(self) -> dict[str, float]:
        """Return percentages, degrees Celsius and watts."""
        nvml = self._nvml
        if self._handle is None:
            # In the first reading, which the training thread makes: the current device is a property of the thread. By
            # UUID, since torch numbers only the visible devices, but the driver all of them.
            self._handle = self._find(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        handle = self._handle
        numbers: dict[str, float] = {}
        try:
            use = nvml.nvmlDeviceGetUtilizationRates(handle)
        except nvml.NVMLError_NotSupported:  # in a MIG instance
            pass
        else:
            numbers = {"gpu_percentage": use.gpu, "memory_percentage": use.memory}
        return numbers | {
            "gpu_temperature_C": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "gpu_power_usage_W": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        }

    def _find(self, uuid: object) -> Any:
        nvml = self._nvml
        try:
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError_NotFound:  # a MIG instance, which has no temperature and power of its own
            return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"))


T = TypeVar("T")


class BackgroundReader(Generic[T]):
    """Reader that reads once in the calling thread, and then at an interval in a separate thread until it is closed.

    A failed reading ends the thread with a warning that begins with `what`, and the last successful reading is kept.
    """

    def __init__(self, what: str, read: Callable[[], T], interval_s: float) -> None:
        self._what, self._read, self._interval_s = what, read, interval_s
        self._readings: list[T] = []  # the latest one; shared with the thread, which does not refer to this object
        self._ends = threading.Event()

    def latest(self) -> T:
        """Return the latest reading. The first call reads and starts the thread."""
        if not self._readings:
            self._readings, self._ends = [self._read()], threading.Event()
            # An unclosed reader is garbage collected, which ends its thread.
            arguments = (self._what, self._read, self._interval_s, self._readings, self._ends)
            threading.Thread(target=_keep_reading, args=arguments, name="composer-reader", daemon=True).start()
        return self._readings[0]

    def close(self) -> None:
        """Stop the thread. The next `latest` starts another one."""
        self._ends.set()
        self._readings = []

    def __del__(self) -> None:
        self.close()


def _keep_reading(
    what: str, read: Callable[[], T], interval_s: float, readings: list[T], ends: threading.Event
) -> None:
    try:
        read()  # discarded: psutil measures some values since the last call in the same thread
        while not ends.wait(interval_s):
            readings[0] = read()
    except Exception as error:  # a monitor must not end training
        if not ends.is_set():
            warn_logging_problem(
                f"{what} can no longer be read, so the last reading stays: {type(error).__name__}: {error}"
            )
