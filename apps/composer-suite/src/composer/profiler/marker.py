"""A marker: the name of a piece of work, to be started and finished each time it is done."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from composer_events.event import ProfilerAction

if TYPE_CHECKING:
    from composer.profiler.profiler import Profiler
else:  # for typing.get_type_hints: a profiler makes markers
    Profiler = Any

__all__ = ["Marker"]

TFunction = TypeVar("TFunction", bound=Callable[..., Any])


class Marker:
    """Records how long something takes, each time it is done; made by `Profiler.marker`.

    It is a context manager and a decorator, with and without parentheses, and has `start` and `finish` for what is
    neither a block nor a function. What begins while the profiler skips is recorded neither then nor at its end.

    Args:
        profiler: Knows the time in training, what it does now, and whom to tell.
        name: The name in the trace.
        actions: What the profiler has to be doing for the marker to record.
        record_instant_on_start: Whether to record an instant, too, when the work begins.
        record_instant_on_finish: Whether to record one when it ends.
        categories: What it belongs to.

    Attributes:
        begin_ns: When it was recorded last that the work begins, in nanoseconds since 1970.
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
        self.actions = frozenset(actions)
        self.record_instant_on_start = record_instant_on_start
        self.record_instant_on_finish = record_instant_on_finish
        self.categories = tuple(categories)
        self._profiler = profiler
        self._is_started = False
        self._is_recording = False
        self.begin_ns = 0

    def start(self) -> None:
        """Begin.

        Raises:
            RuntimeError: If it has begun already and not ended.
        """
        if self._is_started:
            raise RuntimeError(f"The marker {self.name!r} is already started. Call its finish() first.")
        self._is_started = True
        self._is_recording = self._profiler.action in self.actions
        if self._is_recording:
            self.begin_ns = time.time_ns()
            self._record_duration(is_start=True, time_ns=self.begin_ns)
            if self.record_instant_on_start:
                self._record_instant()

    def finish(self) -> None:
        """End.

        Raises:
            RuntimeError: If it has not begun.
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
        """Whether it was recorded that the work begins, and not that it ends."""
        return self._is_started and self._is_recording

    def cut_off(self, time_ns: int) -> None:
        """Record the end of work that an exception has cut off; `finish` then records none.

        Args:
            time_ns: When that was, in nanoseconds since 1970.
        """
        if self.is_open:
            self._is_recording = False
            self._record_duration(is_start=False, time_ns=time_ns)

    def instant(self) -> None:
        """Record that something has happened, without a duration."""
        if self._profiler.action in self.actions:
            self._record_instant()

    def counter(self, values: Mapping[str, int | float]) -> None:
        """Record numbers that change over time.

        Args:
            values: The numbers by their names.
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
        """Decorate a function, so that each of its calls is recorded."""
        if function is None:
            return self

        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return marked
