"""Where the time of the steps goes, as whoever stands beside the loop sees it."""

from __future__ import annotations

import time
from typing import Final

from composer_events.event import Event

__all__ = ["StepTime"]

# What has just ended when an event fires. Whoever stands beside the loop is called last, so that the algorithms and
# callbacks of the event count as well; the page says so.
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
    """Adds up, by the host's clock, how long each part of a step takes.

    A device that works on its own is still at it when the host goes on; what it owes shows where the host waits.

    Attributes:
        seconds: What each part has taken so far.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(_ENDS.values(), 0.0)
        self._since: float | None = None

    def see(self, event: Event) -> None:
        """Look at the clock."""
        part = _ENDS.get(event)
        if part is None and event not in _BEGINS:
            return
        now = time.perf_counter()
        if part is not None and self._since is not None:
            self.seconds[part] += now - self._since
        self._since = now
