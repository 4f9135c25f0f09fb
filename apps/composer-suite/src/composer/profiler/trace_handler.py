"""What a trace handler is: a callback that is told of every span, instant and counter that a profiler records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from composer_events.callback import Callback

if TYPE_CHECKING:
    from composer_time import Timestamp

__all__ = ["TraceHandler"]


class TraceHandler(Callback):
    """Receive what a `Profiler` records: each method does nothing until a subclass says otherwise.

    The methods may be called by other threads than the training's, such as that of the `SystemProfiler`.
    """

    def process_duration_event(
        self,
        name: str,
        categories: Sequence[str],
        is_start: bool,
        timestamp: Timestamp,
        wall_clock_time_ns: int,
    ) -> None:
        """Take the begin or the end of a span.

        Args:
            name: The span's name, such as `'event/epoch'`. Spans of one thread lie one inside the other.
            categories: What it belongs to.
            is_start: Whether it begins.
            timestamp: The time in training.
            wall_clock_time_ns: Nanoseconds since 1970.
        """

    def process_instant_event(
        self, name: str, categories: Sequence[str], timestamp: Timestamp, wall_clock_time_ns: int
    ) -> None:
        """Take what has no duration; the arguments are those of `process_duration_event`."""

    def process_counter_event(
        self,
        name: str,
        categories: Sequence[str],
        timestamp: Timestamp,
        wall_clock_time_ns: int,
        values: Mapping[str, int | float],
    ) -> None:
        """Take numbers that change over time; the other arguments are those of `process_duration_event`.

        Args:
            name: What they describe, such as `'cpu'`.
            categories: What it belongs to.
            timestamp: The time in training.
            wall_clock_time_ns: Nanoseconds since 1970.
            values: The numbers by their names.
        """

    def process_chrome_json_trace_file(self, filepath: str) -> None:
        """Take a trace that somebody else wrote, in Chrome's format; it may be compressed by gzip.

        Args:
            filepath: The file, which stays where it is.
        """
