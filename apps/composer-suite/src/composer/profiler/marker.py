"""Marker of a named piece of work, started and finished each time it is done."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from composer_events.event import ProfilerAction

if TYPE_CHECKING:
    from composer.profiler.profiler import Profiler
else:  # for typing.get_type_hints, without a circular import
    Profiler = Any

__all__ = ["Marker"]

TFunction = TypeVar("TFunction", bound=Callable[..., Any])


class Marker:
    """Record the duration of a piece of work each time it is done; created by `Profiler.marker`.

    It is a context manager and a decorator, with or without parentheses. Use `start` and `finish` for work that is
    neither a block nor a function. If the profiler skips the batch when the work begins, nothing is recorded.

    Args:
        profiler: The profiler, which has the timestamp, the current action and the trace handlers.
        name: Name in the trace.
        actions: Actions of the profiler in which the marker records.
        record_instant_on_start: Whether to also record an instant when the work begins.
        record_instant_on_finish: Whether to also record an instant when it ends.
        categories: Categories in the trace.

    Attributes:
        begin_ns: Time of the last recorded beginning, in nanoseconds since 1970.
    """

    def __init__(
        self,
        profiler: Profiler,
        name: str,
        *,
        actions: Sequence[ProfilerAction],
        record_instant_on_start: bool = False,
        record_instant_on_finish: bool = False,
        categories: Sequence[str] = (),
    ) -> None:
        self.name = name
        # A set, because it is searched on each event of each step.
        self.actions = frozenset(actions)
        self.record_instant_on_start = record_instant_on_start
        self.record_instant_on_finish = record_instant_on_finish
        self.categories = tuple(categories)
        self._profiler = profiler
        self._is_started = False
        self._is_recording = False
        self.begin_ns = 0

    def start(self) -> None:
        """Start the work.

        Raises:
            RuntimeError: If it is already started.
        """
        if self._is_started:
            raise RuntimeError(f"The marker {self.name!r} is already started. Call its finish() first.")
        self._is_started = True
        self._is_recording = self._profiler.action in self.actions  # the action may change before `finish`
        if self._is_recording:
            self.begin_ns = time.time_ns()
            self._record_duration(is_start=True, time_ns=self.begin_ns)
            if self.record_instant_on_start:
                self._record_instant()

    def finish(self) -> None:
        """Finish the work.

        Raises:
            RuntimeError: If it is not started.
        """
        if not self._is_started:
            raise RuntimeError(f"The marker {self.name!r} is not started. Call its start() before finish().")
        self._is_started = False
        if self._is_recording:
            self._record_duration(is_start=False, time_ns=time.time_ns())
            if self.record_instant_on_finish:
                self._record_instant()

    @property
    def is_open(self) -> bool:
        """True if a beginning was recorded without its end."""
        return self._is_started and self._is_recording

    def cut_off(self, time_ns: int) -> None:
        """Record the end of work interrupted by an exception. A later `finish` records nothing.

        Args:
            time_ns: Time of the exception, in nanoseconds since 1970.
        """
        if self.is_open:
            self._is_recording = False
            self._record_duration(is_start=False, time_ns=time_ns)

    def instant(self) -> None:
        """Record an event without duration."""
        if self._profiler.action in self.actions:
            self._record_instant()

    def counter(self, values: Mapping[str, int | float]) -> None:
        """Record values that change over time.

        Args:
            values: Values by name.
        """
        if self._profiler.action in self.actions:
            now = time.time_ns()
            for handler in self._profiler.trace_handlers:
                handler.process_counter_event(self.name, self.categories, self._profiler.timestamp, now, values)

    def _record_duration(self, *, is_start: bool, time_ns: int) -> None:
        for handler in self._profiler.trace_handlers:
            handler.process_duration_event(self.name, self.categories, is_start, self._profiler.timestamp, time_ns)

    def _record_instant(self) -> None:
        now = time.time_ns()
        for handler in self._profiler.trace_handlers:
            handler.process_instant_event(self.name, self.categories, self._profiler.timestamp, now)

    def __enter__(self) -> Marker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    @overload
    def __call__(self) -> Marker: ...
    @overload
    def __call__(self, function: TFunction) -> TFunction: ...
    def __call__(self, function: Any = None) -> Any:
        """Decorate a function to record each call."""
        if function is None:  # `@marker()`
            return self

        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return marked
