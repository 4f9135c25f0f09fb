"""What the numbers are counted in that the Trainer, our callbacks and our loggers log."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from composer.report.runs import Curve

__all__ = ["units_of"]

_SECONDS: Final = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}
_OF_TIME: Final = ("time/train", "time/val", "time/total")
_TOLERANCE: Final = 1e-3  # of the ratio of two readings of one clock, which are rounded
# The first that a whole name matches counts. Of names that anybody may have chosen no unit is guessed.
_KNOWN: Final = tuple(
    (re.compile(pattern), unit)
    for pattern, unit in (
        (r"time/batch(_in_epoch)?", "batches"),
        (r"time/(epoch|sample|token)(_in_epoch)?", r"\1s"),
        (r"throughput/(batches|samples|tokens)_per_sec", r"\1/s"),
        (r"throughput/device/(batches|samples|tokens)_per_sec", r"\1/s per device"),
        (r"throughput/flops_per_sec", "FLOP/s"),
        (r"throughput/device/flops_per_sec", "FLOP/s per device"),
        (r"throughput/device/mfu", "share of the peak"),
        (r"memory/\w*(_mem|gigabytes)\w*", "GB"),
        (r"memory/alloc_retries\w*", "retries"),
        (r"trainer/device_train_microbatch_size", "samples"),
        (r"(cpu|disk)_memory_percent|cpu_percentage|(m\w\w_)?(gpu|memory)_percentage_rank_\d+", "%"),
        (r"(cpu|disk)_memory_\w+", "bytes"),
        (r"network_bytes_\w+", "bytes since the start of the machine"),
        (r"network_packets_\w+", "packets since the start of the machine"),
        (r"(m\w\w_)?gpu_temperature_C_rank_\d+", "°C"),
        (r"(m\w\w_)?gpu_power_usage_W_rank_\d+", "W"),
    )
)


def units_of(curves: Mapping[str, Curve], config: Mapping[str, Any]) -> dict[str, str]:
    """Return the units of a run's metrics by their names; those whose unit is not known are left out.

    Args:
        curves: What was logged.
        config: The settings, by names with slashes: the estimate of what remains has its unit there.

    Example:
        >>> units_of({"throughput/device/samples_per_sec": ..., "loss/train/total": ...}, {})
        {'throughput/device/samples_per_sec': 'samples/s per device'}
    """
    known = ((name, _known_unit(name)) for name in curves)
    units = {name: unit for name, unit in known if unit is not None}
    if (of_time := _unit_of_time(curves)) is not None:
        units |= {name: of_time for name in _OF_TIME if name in curves}
    if (remaining := config.get("time/remaining_estimate_unit")) in _SECONDS and "time/remaining_estimate" in curves:
        units["time/remaining_estimate"] = remaining
    return units


def _known_unit(name: str) -> str | None:
    for pattern, unit in _KNOWN:
        if match := pattern.fullmatch(name):
            return match.expand(unit) if "\\" in unit else unit
    return None


def _unit_of_time(curves: Mapping[str, Curve]) -> str | None:
    """Return what a `SpeedMonitor` counts time in: it logs the clock by which the log itself has seconds."""
    curve = curves.get("time/train")
    if curve is None:
        return None
    for value, seconds in zip(reversed(curve.values), reversed(curve.at["time_s"]), strict=True):
        if math.isfinite(value) and value > 0 and seconds > 0:
            ratio = seconds / value
            return next((unit for unit, of in _SECONDS.items() if math.isclose(ratio, of, rel_tol=_TOLERANCE)), None)
    return None
