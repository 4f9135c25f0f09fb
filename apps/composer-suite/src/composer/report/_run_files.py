"""Files of a run, written without waiting for pending device computations, and the facts in them."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from logging import DEBUG, WARNING, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from composer.loggers._service_queue import Snapshot, as_number
from composer.loggers._text_output import to_plain
from composer.loggers.file_logger import KeptFile
from composer_dist.attempts import write_attempt_of_rank
from composer_dist.progress import VARIABLE, progress_recorder
from composer_events.event import Event
from composer_events.state import State

if TYPE_CHECKING:
    from composer_time import Timestamp

__all__ = ["FactFiles", "MetricLines", "keep_lines"]


def saved_checkpoints(state: State) -> list[str]:
    """Return the paths or URIs of this run's checkpoints."""
    places: list[str] = []
    for callback in state.callbacks:
        # By attribute, because the saver's module is slow to import and may not be needed.
        for path in getattr(callback, "saved_checkpoints", ()):
            places.append(path if getattr(callback, "remote_uploader", None) is not None else os.path.abspath(path))
    return places


def saved_traces(state: State) -> list[str]:
    """Return the paths of the traces that this run's profiler has written and kept."""
    paths: list[str] = []
    for callback in state.callbacks:
        merged = getattr(callback, "merged_trace", None)
        paths += [*getattr(callback, "saved_traces", ()), *([] if merged is None else [merged])]
    return [os.path.abspath(path) for path in paths]


def profiler_times(state: State) -> list[dict[str, Any]]:
    """Return the durations from the recorders of a profiler, if there are any."""
    # By attribute, because few runs are profiled, and the recorder's module imports those of all traces.
    handlers: list[Any] = getattr(state.profiler, "trace_handlers", [])
    return [
        {
            "name": time.name,
            "count": time.count,
            "total_s": time.total_ns / 1e9,
            "median_s": time.quantile_ns(0.5) / 1e9,
            "p95_s": time.quantile_ns(0.95) / 1e9,
            "longest_s": time.longest_ns / 1e9,
            "share_of_steps": shares.get(time.name),
        }
        for handler in handlers
        if hasattr(handler, "shares_of_steps")
        for shares in (handler.shares_of_steps(),)
        for time in handler.times.values()
    ]


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
    Event.BATCH_END: "callbacks",
    Event.EVAL_AFTER_ALL: "evaluation",
    Event.BATCH_CHECKPOINT: "checkpoints",
    Event.EPOCH_CHECKPOINT: "checkpoints",
}
_BEGINS: Final = frozenset({Event.FIT_START, Event.EPOCH_START, Event.EPOCH_END, Event.EVAL_BEFORE_ALL})
_OPTIMIZER: Final = "optimizer"


class StepTime:
    """Total duration of each part of a step, measured on the host.

    Devices work asynchronously, so their time appears in the part in which the host synchronizes.

    Attributes:
        is_stepping: Whether the optimizer's step has begun and not yet ended.
    """

    def __init__(self) -> None:
        parts = list(dict.fromkeys(_ENDS.values()))
        parts.insert(parts.index("callbacks"), _OPTIMIZER)
        self.seconds: dict[str, float] = dict.fromkeys(parts, 0.0)
        self.is_stepping = False
        self._since: float | None = None

    def see(self, event: Event) -> None:
        """Add the time since the last event to the part that ends with this one."""
        part = _ENDS.get(event)
        if part is None and event not in _BEGINS:
            return
        if self.is_stepping:  # nothing was logged after the step, as in a custom loop
            part = _OPTIMIZER
        self.is_stepping = event is Event.AFTER_TRAIN_BATCH
        now = time.perf_counter()
        # Events of `_BEGINS` end no part: the time before them, such as between epochs, is not counted.
        if part is not None and self._since is not None:
            self.seconds[part] += now - self._since
        self._since = now

    def end_step(self) -> None:
        """Add the time since AFTER_TRAIN_BATCH to the optimizer, because no event follows its step directly."""
        self.is_stepping = False
        now = time.perf_counter()
        if self._since is not None:
            self.seconds[_OPTIMIZER] += now - self._since
        self._since = now


_PART_OF: Final = {
    "waiting for data": "data",
    "preparing the batch": "train",
    "forward": "train",
    "loss": "train",
    "backward": "backward",
    "after backward": "callbacks",
    _OPTIMIZER: "optimizer",
    "callbacks": "callbacks",
    "evaluation": "evaluation",
    "checkpoints": "checkpoint",
}


class OwnAttempt:
    """The record of this process's attempt at the run, where no launcher keeps it."""

    def __init__(self) -> None:
        self._started_s, self._began_s = time.time(), time.monotonic()
        self._first_batch: int | None = None
        self._before: dict[str, float] = {}

    def start(self, batch: int, seconds: Mapping[str, float]) -> None:
        """Start to count at a batch, with the seconds of the step so far, which earlier attempts may have spent."""
        if self._first_batch is None:
            self._first_batch, self._before = batch, dict(seconds)

    def write(self, folder: Path, batch: int, seconds: Mapping[str, float], status: str) -> None:
        """Write the record, once training has started, unless a launcher does."""
        is_launched = VARIABLE in os.environ and progress_recorder() is not None
        if is_launched or self._first_batch is None:
            return
        parts: dict[str, float] = {}
        for name, spent in seconds.items():
            part = _PART_OF.get(name, "between")
            parts[part] = parts.get(part, 0.0) + max(0.0, spent - self._before.get(name, 0.0))
        ending = "stopped" if status == "stopped early" else status
        with suppress(OSError):  # `FactFiles` warns of a disk that cannot be written
            # The clock may be set meanwhile.
            times_s = self._started_s, self._started_s + time.monotonic() - self._began_s
            write_attempt_of_rank(folder, times_s, (self._first_batch, batch), parts, ending)


def _note_loss(line: Mapping[str, Any]) -> None:
    """Record the loss of a line for the launcher: here its value has arrived on the host."""
    from composer.trainer._rank_sync import TOTAL  # not at the top: the Trainer imports this module

    loss, recorder = line["metrics"].get(TOTAL), progress_recorder()
    if recorder is not None and isinstance(loss, float):
        recorder.note_loss(loss, line["batch"])


_PLAIN = frozenset({bool, int, float})


class MetricLines:
    """File with one line per time in training."""

    def __init__(self, path: Path, *, is_continued: bool) -> None:
        self.num_lines = 0
        self._file = KeptFile(path, -1, is_continued)
        self.pending: deque[_Line] = deque()

    def add(self, stamp: Timestamp, step: int | None, metrics: Mapping[str, Any]) -> None:
        """Add values; those on a device stay pending until their copies have arrived."""
        if step is not None and type(step) is not int:
            with suppress(Exception):  # such as a NumPy number or a `Time`; a foreign object may raise anything
                step = int(step)
            step = step if type(step) is int else None
        last = self.pending[-1] if self.pending else None
        if last is None or not last.has_room(stamp, step, metrics):
            last = _Line(stamp, step)
            self.pending.append(last)
        if _PLAIN.issuperset(map(type, metrics.values())):  # fast path for the most common case
            last.known |= metrics
            return
        on_devices: dict[str, Any] = {}
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                on_devices[name] = value
            elif (number := as_number(value)) is not None:
                last.known[name] = number
        if on_devices:
            last.coming.append(Snapshot(on_devices))

    def write(self, *, waits: bool) -> None:
        """Write the leading lines whose values are available, or wait for all of them."""
        while self.pending and (waits or all(snapshot.is_ready() for snapshot in self.pending[0].coming)):
            line = self.pending.popleft().as_json()
            if line["metrics"]:  # empty if all values were text or on a failed device
                self._file.write(json.dumps(line).encode() + b"\n")
                self.num_lines += 1
                _note_loss(line)

    def flush(self) -> None:
        """Write the lines whose values are available, so that readers of the file see them."""
        self.write(waits=False)
        self._file.flush()

    def sync(self) -> None:
        """Write everything, and sync the file to the disk."""
        self.write(waits=True)
        self._file.sync()

    def keep(self, num_lines: int) -> None:
        """Truncate the file to its first `num_lines` lines."""
        self._file.close()
        try:
            self.num_lines = keep_lines(self._file.path, num_lines)
        except OSError as error:  # a full disk must not end the training
            _log.warning("%s keeps lines that the resumed run repeats: %s", self._file.path, error)
        self._file = KeptFile(self._file.path, -1, is_continued=True)

    def close(self) -> None:
        """Write everything, and close the file."""
        self.sync()
        self._file.close()


@dataclass(slots=True)
class _Line:
    stamp: Timestamp
    step: int | None
    known: dict[str, Any] = field(default_factory=dict[str, Any])
    coming: list[Snapshot] = field(default_factory=list[Snapshot])

    def has_room(self, stamp: Timestamp, step: int | None, metrics: Mapping[str, Any]) -> bool:
        # Identity suffices, and is fast: the loop creates a new timestamp whenever the time changes.
        if self.stamp is not stamp or self.step != step or not self.known.keys().isdisjoint(metrics):
            return False
        return all(snapshot.values.keys().isdisjoint(metrics) for snapshot in self.coming)

    def as_json(self) -> dict[str, Any]:
        known, stamp = self.known, self.stamp
        for snapshot in self.coming:
            try:
                arrived = snapshot.read()
            except RuntimeError:  # a failed device must not cost the other values
                continue
            known |= arrived
        values = {str(name): number for name, value in known.items() if (number := _json_number(value)) is not None}
        return {
            "batch": stamp.num_batches if self.step is None else self.step,
            "epoch": stamp.num_epochs,
            "sample": stamp.num_samples,
            "token": stamp.num_tokens,
            "time_s": stamp.total_wct.total_seconds(),
            "metrics": values,
        }


def _json_number(value: Any) -> float | str | None:
    number = as_number(value)
    # JSON has neither NaN nor infinities.
    return number if number is None or math.isfinite(number) else str(number)


_log = getLogger(__name__)


class FactFiles:
    """JSON files in a folder. Failed writes are logged, the first one as a warning."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._texts: dict[str, str] = {}
        self._has_warned = False

    def write(self, name: str, value: Any) -> None:
        """Replace a file if its content has changed."""
        text = json.dumps(to_plain(value), indent=1)
        if self._texts.get(name) == text:  # as in most flushes, since facts rarely change
            return
        path, unfinished = self._folder / name, self._folder / f".{name}.unfinished"
        try:
            # Replaced atomically, so that a reader or a kill never sees half a file.
            unfinished.write_text(text)
            unfinished.replace(path)
            self._texts[name] = text
        except OSError as error:  # a full disk must not end the training, nor fill the log with warnings
            _log.log(DEBUG if self._has_warned else WARNING, "%s could not be written: %s", path, error)
            self._has_warned = True


def keep_lines(path: Path, num_lines: int) -> int:
    """Truncate a file to its first complete lines, and return their number.

    The file is replaced when the new one is complete.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    num_kept = 0
    # In binary mode: a kill may have cut the last line within a character.
    with path.open("rb") as lines, unfinished.open("wb") as kept:
        for line in islice(lines, num_lines):
            if line.endswith(b"\n"):
                kept.write(line)
                num_kept += 1
    unfinished.replace(path)
    return num_kept
