"""Base class of trace handlers, the callbacks that receive the records of a profiler, and one that keeps a table."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from composer_events.arguments import check_counts
from composer_events.callback import Callback

if TYPE_CHECKING:
    from composer_events.state import State
    from composer_time import Timestamp

__all__ = ["EventRecorder", "Span", "TimeOfName", "TraceHandler", "profiler_of"]


class TraceHandler(Callback):
    """Receiver of the spans, instants and counters of a `Profiler`. All methods do nothing by default.

    The methods may be called from other threads than that of training, such as that of the `SystemProfiler`.
    """

    def process_duration_event(
        self,
        name: str,
        categories: Sequence[str],
        is_start: bool,
        timestamp: Timestamp,
        wall_clock_time_ns: int,
    ) -> None:
        """Process the beginning or the end of a span.

        Args:
            name: Name of the span, such as `'event/epoch'`. Spans of one thread are nested.
            categories: Categories of the span.
            is_start: Whether it begins.
            timestamp: Timestamp of training.
            wall_clock_time_ns: Nanoseconds since 1970.
        """

    def process_instant_event(
        self, name: str, categories: Sequence[str], timestamp: Timestamp, wall_clock_time_ns: int
    ) -> None:
        """Process an event without duration; the arguments are those of `process_duration_event`."""

    def process_counter_event(
        self,
        name: str,
        categories: Sequence[str],
        timestamp: Timestamp,
        wall_clock_time_ns: int,
        values: Mapping[str, int | float],
    ) -> None:
        """Process values by name that change over time; the others are those of `process_duration_event`."""

    def process_chrome_json_trace_file(self, filepath: str) -> None:
        """Process a trace file in Chrome's format, possibly compressed by gzip.

        Args:
            filepath: The file, which must be left in place.
        """


def profiler_of(state: State, callback: Callback) -> Any:
    """Return the profiler of a run, which a callback needs."""
    if state.profiler is None:
        raise RuntimeError(
            f"A {type(callback).__name__} needs a profiler, and the Trainer has none. Give it one: "
            f"Trainer(profiler=Profiler(schedule, trace_handlers))."
        )
    return state.profiler


_NUM_LATEST: Final = 1_000  # durations per name, for quantiles with bounded memory
# A training step consists of these, and of the algorithms and callbacks on the events that surround them.
_PARTS_OF_STEP: Final = ("event/dataloader", "event/batch")
_BETWEEN_PARTS: Final = frozenset({"before_dataloader", "after_dataloader", "batch_start", "batch_end"})


@dataclass(frozen=True, slots=True)
class Span:
    """Recorded piece of work: its name, beginning in nanoseconds since 1970, duration, and batch."""

    name: str
    begin_ns: int
    duration_ns: int
    batch: int


@dataclass(slots=True)
class TimeOfName:
    """Statistics of all spans with one name.

    Attributes:
        name: Name of the spans, such as `'algorithm/MixUp/event/after_dataloader'`.
        count: Number of spans.
        total_ns: Total duration, in nanoseconds.
        longest_ns: Longest duration, in nanoseconds.
        in_steps_ns: Total duration of the spans within training steps. Spans around steps, such as epochs, or between
            steps, such as evaluations, do not count.
        latest_ns: Durations of the latest thousand spans, oldest first.
    """

    name: str
    count: int = 0
    total_ns: int = 0
    longest_ns: int = 0
    in_steps_ns: int = 0
    latest_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_NUM_LATEST))

    @property
    def mean_ns(self) -> float:
        """The mean duration, in nanoseconds."""
        return self.total_ns / self.count if self.count else 0.0

    def quantile_ns(self, share: float) -> float:
        """Return a quantile of the latest thousand durations, in nanoseconds, with linear interpolation.

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
    """Trace handler that accumulates the spans of a `Profiler` in constant memory.

    Args:
        num_spans: Number of the latest spans to keep individually.

    Attributes:
        spans: The latest spans, oldest first.
        times: Statistics of the spans of each name.

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
        """Return, by name, the fraction in [0, 1] of the training steps' time that the spans took.

        A step consists of the wait for its data, the batch, and the algorithms and callbacks around both. Names without
        spans in steps are left out.
        """
        steps_ns = sum(time.total_ns for time in self.times.values() if _is_part_of_step(time.name))
        if not steps_ns:  # no step has finished
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
        """Record the beginning or the end of a span."""
        if is_start:
            self._begun_ns[name] = wall_clock_time_ns
            return
        begin_ns = self._begun_ns.pop(name, None)
        if begin_ns is None:  # it began before the recording
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
        # Inner spans end first, so the part of the step that contains this span is still open.
        if any(part in self._begun_ns for part in _PARTS_OF_STEP) or _is_part_of_step(name):
            time.in_steps_ns += duration_ns

    def table(self) -> str:
        """Return a table of the names by total time, with their share of the training steps."""
        shares = self.shares_of_steps()
        rows: list[tuple[str, ...]] = [
            ("name", "count", "total s", "mean ms", "median ms", "p95 ms", "longest ms", "of steps")
        ]
        for time in sorted(self.times.values(), key=lambda time: -time.total_ns):
            share = shares.get(time.name)
            each_ns = (time.mean_ns, time.quantile_ns(0.5), time.quantile_ns(0.95), time.longest_ns)
            numbers = (f"{time.total_ns / 1e9:.3f}", *(f"{each / 1e6:.3f}" for each in each_ns))
            rows.append((time.name, str(time.count), *numbers, "" if share is None else f"{share:.1%}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
        return "\n".join("  ".join(line).rstrip() for line in lines)


def _is_part_of_step(name: str) -> bool:
    return name in _PARTS_OF_STEP or (
        name.startswith(("algorithm/", "callback/")) and name.rpartition("/event/")[2] in _BETWEEN_PARTS
    )
