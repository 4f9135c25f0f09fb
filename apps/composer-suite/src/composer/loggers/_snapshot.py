"""Logged values as they were when they were logged, read when somebody needs numbers: logging waits for no device."""

from collections.abc import Mapping
from typing import Any

import torch

from composer_events.logger_destination import detached_copy, format_log_data_value, map_values

__all__ = ["Snapshot", "as_number"]

_BYTES_OF_A_NUMBER = 128  # roughly what a name and a number take in Python


class Snapshot:
    """Values by name that change no more.

    Tensors of an accelerator are on their way to the host when this returns: the copy is enqueued behind the work that
    computes them, and only who reads waits for it.

    Args:
        values: Numbers, tensors, arrays, text, or containers of these. Later changes to them do not show here.

    Attributes:
        values: The copies. Kinds and shapes are right at once, what is in a tensor only after `wait`.
        size_bytes: Roughly how much memory it takes.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._arrivals: dict[torch.device, torch.Event] = {}
        self.size_bytes = 0
        self.values: dict[str, Any] = {name: map_values(self._take, value) for name, value in values.items()}
        for device, arrival in self._arrivals.items():
            arrival.record(torch.accelerator.current_stream(device))

    def is_ready(self) -> bool:
        """Answer whether waiting would take no time."""
        return all(arrival.query() for arrival in self._arrivals.values())

    def wait(self) -> None:
        """Wait until the values are on the host."""
        for arrival in self._arrivals.values():
            arrival.synchronize()

    def read(self) -> dict[str, Any]:
        """Wait, and return the values with tensors of one element as numbers."""
        self.wait()
        return {name: map_values(_to_number, value) for name, value in self.values.items()}

    def _take(self, value: Any) -> Any:
        self.size_bytes += _BYTES_OF_A_NUMBER + _size_bytes(value)
        if isinstance(value, torch.Tensor) and value.is_meta:
            return format_log_data_value(value)  # it has no values that could be copied
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            return detached_copy(value)
        self._arrivals.setdefault(value.device, torch.Event(value.device))
        return value.detach().to("cpu", non_blocking=True)  # into pinned memory, without which this would wait


def _size_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        return int(value.element_size() * value.numel())  # of a sparse one the most that it can be
    return int(getattr(value, "nbytes", 0))


def _to_number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def as_number(value: Any) -> float | None:
    """Return what can be drawn as a point of a curve as a float, and `None` for what cannot, such as text."""
    if isinstance(value, str):
        return None
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except Exception:  # whatever arrays, tensors and somebody else's objects raise
        return None
