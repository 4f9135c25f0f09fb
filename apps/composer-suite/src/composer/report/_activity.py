"""Activity of algorithms by event and batch, and durations of the parts of a step, with bounded memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from composer_events.event import Event

__all__ = ["Acting", "StepTime"]

_MOST_RANGES = 500  # per algorithm and event, more than a screen can show


class Acting:
    """Ranges of batches in which each algorithm has acted, by event.

    Consecutive batches form one range. If there are too many ranges, those with small gaps between them are merged.

    Example:
        >>> acting = Acting()
        >>> for batch in (0, 1, 2, 7):
        ...     acting.add("MixUp on before_forward", batch)
        >>> acting.as_dict()
        {'MixUp on before_forward': {'count': 4, 'batches': [[0, 2], [7, 7]]}}
    """

    def __init__(self) -> None:
        self._ranges: dict[str, list[list[int]]] = {}
        self._counts: dict[str, int] = {}
        self._gaps: dict[str, int] = {}

    def restore(self, acting: Mapping[str, Any]) -> None:
        """Continue from the `as_dict` of an earlier part of the run."""
        self._ranges = {name: [list(batches) for batches in acted["batches"]] for name, acted in acting.items()}
        self._counts = {name: acted["count"] for name, acted in acting.items()}

    def add(self, name: str, batch: int) -> None:
        """Add a batch in which `name` has acted."""
        ranges = self._ranges.setdefault(name, [])
        self._counts[name] = self._counts.get(name, 0) + 1
        gap = self._gaps.setdefault(name, 1)
        # A smaller batch number, as after loading a checkpoint, starts another range.
        if ranges and 0 <= batch - ranges[-1][1] <= gap:
            ranges[-1][1] = batch
            return
        ranges.append([batch, batch])
        while len(ranges) > _MOST_RANGES:  # the gap doubles, so this happens rarely in a long run
            self._gaps[name] = gap = 2 * gap
            ranges[:] = _joined(ranges, gap)

    def as_dict(self) -> dict[str, dict[str, object]]:
        """Return, by name, the number of batches and the ranges, each with its first and last batch."""
        return {name: {"count": self._counts[name], "batches": ranges} for name, ranges in self._ranges.items()}


def _joined(ranges: Iterable[list[int]], gap: int) -> list[list[int]]:
    joined: list[list[int]] = []
    for first, last in ranges:
        if joined and 0 <= first - joined[-1][1] <= gap:
            joined[-1][1] = last
        else:
            joined.append([first, last])
    return joined


# The part of a step that ends with an event. The recorder is called last, so a part includes the algorithms and
# callbacks of that event, as the page explains.
_ENDS: Final = {
    Event.BATCH_START: "waiting for data",
    Event.BEFORE_FORWARD: "preparing the batch",
    Event.AFTER_FORWARD: "forward",
    Event.AFTER_LOSS: "loss",
    Event.AFTER_BACKWARD: "backward",
    Event.AFTER_TRAIN_BATCH: "after backward",
    Event.BATCH_END: "optimizer's step and callbacks",
    Event.EVAL_AFTER_ALL: "evaluation",
    Event.BATCH_CHECKPOINT: "checkpoints",
    Event.EPOCH_CHECKPOINT: "checkpoints",
}
_BEGINS: Final = frozenset({Event.FIT_START, Event.EPOCH_START, Event.EPOCH_END, Event.EVAL_BEFORE_ALL})


class StepTime:
    """Total duration of each part of a step, measured on the host.

    Devices work asynchronously, so their time appears in the part in which the host synchronizes.

    Attributes:
        seconds: The total of each part so far.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(_ENDS.values(), 0.0)
        self._since: float | None = None

    def see(self, event: Event) -> None:
        """Add the time since the last event to the part that ends with this one."""
        part = _ENDS.get(event)
        if part is None and event not in _BEGINS:
            return
        now = time.perf_counter()
        # Events of `_BEGINS` end no part: the time before them, such as between epochs, is not counted.
        if part is not None and self._since is not None:
            self.seconds[part] += now - self._since
        self._since = now
