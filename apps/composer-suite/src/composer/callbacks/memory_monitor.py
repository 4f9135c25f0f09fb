"""Logging of the accelerator's memory usage."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from composer_dist import dist
from composer_events.arguments import check_counts
from composer_events.callback import Callback

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["MemoryMonitor", "reduce_value"]

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
        self._is_on_cpu = False

    def init(self, state: State, logger: Logger) -> None:
        """Warn if the model is not on an accelerator with memory statistics."""
        self._is_on_cpu = state.device.name == "cpu"
        parameter = next(state.model.parameters(), None)
        if parameter is not None and parameter.device.type in ("cuda", "xpu", "meta"):
            return
        where = "nothing: it has no parameters" if parameter is None else parameter.device.type
        warnings.warn(
            f"The memory monitor only works on CUDA devices, but the model is on {where}.", UserWarning, stacklevel=2
        )

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Log the memory usage before the optimizer step."""
        if self._is_on_cpu:
            return
        parameter = next(state.model.parameters(), None)
        # Checked here, since parameters on the meta device at INIT are materialized later.
        if parameter is None or parameter.device.type not in ("cuda", "xpu"):
            return
        report: dict[str, Any] = self._report()
        interval = self.dist_aggregate_batch_interval
        if interval is not None and state.timestamp.num_batches % interval == 0:
            report |= _over_all_ranks(report, parameter.device)
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


def _over_all_ranks(report: Mapping[str, float], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the mean, minimum and maximum of each value as device tensors, with three collectives."""
    reduced: dict[str, torch.Tensor] = {}
    for ending, operation in (("avg", "SUM"), ("min", "MIN"), ("max", "MAX")):
        # float64, since float32 cannot represent large byte counts exactly.
        values = torch.tensor(list(report.values()), dtype=torch.float64, device=device)
        dist.all_reduce(values, reduce_operation=operation)
        values = values / dist.get_world_size() if ending == "avg" else values
        reduced |= {f"{name}_{ending}": value for name, value in zip(report, values.unbind(), strict=True)}
    return reduced


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
