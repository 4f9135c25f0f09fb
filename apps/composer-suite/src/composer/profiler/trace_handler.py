"""Base class of trace handlers, the callbacks that receive the records of a profiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer_events.callback import Callback

if TYPE_CHECKING:
    from composer_events.state import State
    from composer_time import Timestamp

__all__ = ["TraceHandler", "profiler_of"]


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
        """Process values that change over time.

        Args:
            name: Name of the counter, such as `'cpu'`.
            categories: Categories of the counter.
            timestamp: Timestamp of training.
            wall_clock_time_ns: Nanoseconds since 1970.
            values: Values by name.
        """

    def process_chrome_json_trace_file(self, filepath: str) -> None:
        """Process a trace file in Chrome's format, possibly compressed by gzip.

        Args:
            filepath: The file, which must be left in place.
        """


def profiler_of(state: State, callback: Callback) -> Any:
    """Return the profiler of a run, which a callback needs.

    Raises:
        RuntimeError: If the Trainer has none.
    """
    if state.profiler is None:
        raise RuntimeError(
            f"A {type(callback).__name__} needs a profiler, and the Trainer has none. Give it one: "
            f"Trainer(profiler=Profiler(schedule, trace_handlers))."
        )
    return state.profiler
