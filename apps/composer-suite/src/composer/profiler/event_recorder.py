"""What each event, algorithm and callback takes, added up: the table, and the latest spans one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from composer.profiler.trace_handler import TraceHandler
from composer_events.arguments import check_counts

if TYPE_CHECKING:
    from composer_time import Timestamp

__all__ = ["EventRecorder", "Span", "TimeOfName"]

_NUM_LATEST: Final = 1_000
# A training step is these and, between them, the algorithms and callbacks of the events that begin and end them.
_PARTS_OF_STEP: Final = ("event/dataloader", "event/batch")
_BETWEEN_PARTS: Final = frozenset({"before_dataloader", "after_dataloader", "batch_start", "batch_end"})


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
        in_steps_ns: What those took together that lie in a training step. What surrounds steps, as an epoch does, or
            comes between them, as an evaluation does, lies in none.
        latest_ns: What the latest thousand took, oldest first.
    """

    name: str
    count: int = 0
    total_ns: int = 0
    longest_ns: int = 0
    in_steps_ns: int = 0
    latest_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_NUM_LATEST))

    @property
    def mean_ns(self) -> float:
        """What one takes on average, in nanoseconds."""
        return self.total_ns / self.count if self.count else 0.0

    def quantile_ns(self, share: float) -> float:
        """Return the time in nanoseconds that a share of the latest thousand spans do not exceed.

        Between two of them it lies on the line from one to the other.

        Args:
            share: In [0, 1], such as 0.5 for the median.

        Example:
            >>> TimeOfName("event/loss", count=3, latest_ns=deque([10, 40, 20])).quantile_ns(0.75)
            30.0
        """
        times = sorted(self.latest_ns)
        if not times:
            return 0.0
        place = share * (len(times) - 1)
        below = int(place)
        above = min(below + 1, len(times) - 1)
        return times[below] + (place - below) * (times[above] - times[below])


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
        name         count  total s  mean ms  median ms  p95 ms  longest ms  of steps
        event/batch      1    0.003    2.500      2.500   2.500       2.500    100.0%
    """

    def __init__(self, num_spans: int = 20_000) -> None:
        check_counts(0, num_spans=num_spans)
        self.spans: deque[Span] = deque(maxlen=num_spans)
        self.times: dict[str, TimeOfName] = {}
        self._begun_ns: dict[str, int] = {}

    def shares_of_steps(self) -> dict[str, float]:
        """Return, by name, which part in [0, 1] of the training steps' time its spans took.

        A step is the wait for its data, the batch, and the algorithms and callbacks around these two. Names whose spans
        lie in no step are left out.
        """
        steps_ns = sum(time.total_ns for time in self.times.values() if _is_part_of_step(time.name))
        if not steps_ns:  # the first one is not over yet
            return {}
        return {name: time.in_steps_ns / steps_ns for name, time in self.times.items() if time.in_steps_ns}

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
        time.latest_ns.append(duration_ns)
        if any(part in self._begun_ns for part in _PARTS_OF_STEP) or _is_part_of_step(name):
            time.in_steps_ns += duration_ns

    def table(self) -> str:
        """Return a table for people: names by what they took together, and their share in that of the steps."""
        shares = self.shares_of_steps()
        rows: list[tuple[str, ...]] = [
            ("name", "count", "total s", "mean ms", "median ms", "p95 ms", "longest ms", "of steps")
        ]
        for time in sorted(self.times.values(), key=lambda time: -time.total_ns):
            share = shares.get(time.name)
            each_ns = (time.mean_ns, time.quantile_ns(0.5), time.quantile_ns(0.95), time.longest_ns)
            numbers = (f"{time.total_ns / 1e9:.3f}", *(f"{each / 1e6:.3f}" for each in each_ns))
            rows.append((time.name, str(time.count), *numbers, "" if share is None else f"{share:.1%}"))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )


def _is_part_of_step(name: str) -> bool:
    return name in _PARTS_OF_STEP or (
        name.startswith(("algorithm/", "callback/")) and name.rpartition("/event/")[2] in _BETWEEN_PARTS
    )
