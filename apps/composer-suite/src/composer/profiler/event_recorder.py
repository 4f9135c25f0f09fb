"""What each event, algorithm and callback takes, added up: the table, and the latest spans one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from composer.profiler.trace_handler import TraceHandler
from composer_events.arguments import check_counts

if TYPE_CHECKING:
    from composer_time import Timestamp

__all__ = ["EventRecorder", "Span", "TimeOfName"]

_BATCH = "event/batch"


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work: what it was, when it began in nanoseconds since 1970, how long it took, and in which batch."""

    name: str
    begin_ns: int
    duration_ns: int
    batch: int


@dataclass(slots=True)
class TimeOfName:
    """What all spans of one name took together.

    Attributes:
        name: The spans' name, such as `'algorithm/MixUp/event/after_dataloader'`.
        count: How many there were.
        total_ns: What they took together, in nanoseconds.
        longest_ns: What the longest took.
    """

    name: str
    count: int = 0
    total_ns: int = 0
    longest_ns: int = 0

    @property
    def mean_ns(self) -> float:
        """What one takes on average, in nanoseconds."""
        return self.total_ns / self.count if self.count else 0.0


class EventRecorder(TraceHandler):
    """Adds up what a `Profiler` records, in memory of a fixed size however long the run is.

    Args:
        num_spans: How many of the latest spans are kept one by one.

    Attributes:
        spans: The latest spans, oldest first.
        times: What the spans of each name took together.

    Example:
        >>> from composer_time import Timestamp
        >>> recorder = EventRecorder()
        >>> recorder.process_duration_event("event/batch", [], True, Timestamp(), 1_000)
        >>> recorder.process_duration_event("event/batch", [], False, Timestamp(), 2_501_000)
        >>> print(recorder.table())
        name         count  total s  mean ms  longest ms  of batches
        event/batch      1    0.003    2.500       2.500      100.0%
    """

    def __init__(self, num_spans: int = 20_000) -> None:
        check_counts(0, num_spans=num_spans)
        self.spans: deque[Span] = deque(maxlen=num_spans)
        self.times: dict[str, TimeOfName] = {}
        self._begun_ns: dict[str, int] = {}

    def process_duration_event(
        self,
        name: str,
        categories: Sequence[str],
        is_start: bool,
        timestamp: Timestamp,
        wall_clock_time_ns: int,
    ) -> None:
        """Take the begin or the end of a span."""
        if is_start:
            self._begun_ns[name] = wall_clock_time_ns
            return
        begin_ns = self._begun_ns.pop(name, None)
        if begin_ns is None:
            return
        duration_ns = wall_clock_time_ns - begin_ns
        self.spans.append(Span(name, begin_ns, duration_ns, timestamp.num_batches))
        time = self.times.get(name)
        if time is None:
            time = self.times[name] = TimeOfName(name)
        time.count += 1
        time.total_ns += duration_ns
        time.longest_ns = max(time.longest_ns, duration_ns)

    def table(self) -> str:
        """Return a table for people: names by what they took together, and their share in that of the batches."""
        batches = self.times.get(_BATCH)
        rows = [("name", "count", "total s", "mean ms", "longest ms", "of batches")]
        for time in sorted(self.times.values(), key=lambda time: -time.total_ns):
            share = f"{time.total_ns / batches.total_ns:.1%}" if batches is not None and batches.total_ns else ""
            numbers = (f"{time.total_ns / 1e9:.3f}", f"{time.mean_ns / 1e6:.3f}", f"{time.longest_ns / 1e6:.3f}")
            rows.append((time.name, str(time.count), *numbers, share))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )
