"""The profiler, its markers, and schedules that select the batches to profile."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from composer.profiler.json_trace_handler import JSONTraceHandler
from composer.profiler.system_profiler import SystemProfiler
from composer.profiler.torch_profiler import TorchProfiler
from composer.profiler.trace_handler import TraceHandler
from composer_checkpoint.stores.base import parse_uri
from composer_events.arguments import check_counts
from composer_events.batches import ensure_tuple
from composer_events.callback import Callback
from composer_events.event import ProfilerAction
from composer_events.logger import Logger
from composer_events.state import State
from composer_time import Timestamp

if TYPE_CHECKING:
    from composer_events.state import State

__all__ = ["Marker", "Profiler", "cyclic_schedule"]


def cyclic_schedule(
    skip_first: int = 0, wait: int = 0, warmup: int = 1, active: int = 4, repeat: int = 1
) -> Callable[[State], ProfilerAction]:
    """Return a schedule for `Profiler` that cycles through waiting, warming up and recording in every epoch.

    The last batch of a cycle, or of an epoch inside one, saves the record.

    Args:
        skip_first: Number of batches skipped at the start of an epoch, or after resuming inside one.
        wait: Number of batches skipped in each cycle.
        warmup: Number of batches then recorded and discarded, to exclude the profiler's startup cost.
        active: Number of batches then recorded.
        repeat: Number of cycles in an epoch; 0 for as many as fit.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is negative, or `active` is 0.

    Example:
        >>> from types import SimpleNamespace
        >>> from composer_time import Timestamp
        >>> schedule = cyclic_schedule(skip_first=1, warmup=1, active=2)
        >>> def at(batch):
        ...     return SimpleNamespace(timestamp=Timestamp(batch_in_epoch=batch), dataloader_len=None, profiler=None)
        >>> [schedule(at(batch)).value for batch in range(5)]
        ['skip', 'warmup', 'active', 'active_and_save', 'skip']
    """
    check_counts(0, skip_first=skip_first, wait=wait, warmup=warmup, repeat=repeat)
    check_counts(active=active)
    cycle = wait + warmup + active

    def schedule(state: State) -> ProfilerAction:
        batch = state.timestamp.num_batches_in_epoch
        first = skip_first + getattr(state.profiler, "resumption_batch_idx", 0)
        if batch < first or (repeat and batch >= first + repeat * cycle):
            return ProfilerAction.SKIP
        position = (batch - first) % cycle
        if position < wait:
            return ProfilerAction.SKIP
        if position < wait + warmup:
            return ProfilerAction.WARMUP
        length = state.dataloader_len
        # The last batch of an epoch also saves, since the next epoch starts another cycle.
        if position == cycle - 1 or (length is not None and batch + 1 >= int(length)):
            return ProfilerAction.ACTIVE_AND_SAVE
        return ProfilerAction.ACTIVE

    return schedule


TFunction = TypeVar("TFunction", bound=Callable[..., Any])


class Marker:
    """Record the duration of a piece of work each time it is done; created by `Profiler.marker`.

    It is a context manager and a decorator, with or without parentheses. Use `start` and `finish` for work that is
    neither a block nor a function. If the profiler skips the batch when the work begins, nothing is recorded.

    The other arguments are those of `Profiler.marker`.

    Args:
        profiler: The profiler, which has the timestamp, the current action and the trace handlers.

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


_EVENTS = "event/"  # prefix of the engine's markers
_RECORDED = (ProfilerAction.WARMUP, ProfilerAction.ACTIVE, ProfilerAction.ACTIVE_AND_SAVE)


class Profiler(Callback):
    """Record where training spends its time, for `Trainer(profiler=...)`.

    By default, events of the engine, and each algorithm and callback on each of them, are recorded as spans. A
    `TorchProfiler` adds PyTorch's operators, and a `SystemProfiler` the system load. Trace handlers receive the
    records: a `JSONTraceHandler` writes files for https://ui.perfetto.dev, an `EventRecorder` accumulates a table.
    Arguments that begin with `torch_prof_` are those of `TorchProfiler`.

    Args:
        schedule: Function of the state that returns the action for a batch, or its name; see `cyclic_schedule`.
        trace_handlers: One or several trace handlers.
        sys_prof_cpu: Record CPU utilization.
        sys_prof_memory: Record memory usage.
        sys_prof_disk: Record disk reads and writes.
        sys_prof_net: Record network traffic.
        sys_prof_stats_thread_interval_seconds: Interval between readings of these four, in seconds.

    Attributes:
        schedule: As given.
        remote_filenames: Remote names or URIs of the files, as passed.
        resumption_batch_idx: Batch of the epoch at which training was resumed; schedules start there.

    Raises:
        ValueError: If a memory timeline is requested without all the records that it needs.

    Example:
        >>> from composer.profiler import EventRecorder, cyclic_schedule
        >>> profiler = Profiler(cyclic_schedule(active=2), EventRecorder(), sys_prof_cpu=False)
        >>> len(profiler.trace_handlers)
        1
    """

    def __init__(
        self,
        schedule: Callable[[State], ProfilerAction],
        trace_handlers: TraceHandler | Sequence[TraceHandler],
        sys_prof_cpu: bool = True,
        sys_prof_memory: bool = False,
        sys_prof_disk: bool = False,
        sys_prof_net: bool = False,
        sys_prof_stats_thread_interval_seconds: float = 0.5,
        torch_prof_folder: str = "{run_name}/torch_traces",
        torch_prof_filename: str = "rank{rank}.{batch}.pt.trace.json",
        torch_prof_remote_file_name: str | None = "{run_name}/torch_traces/rank{rank}.{batch}.pt.trace.json",
        torch_prof_memory_filename: str | None = None,
        torch_prof_memory_remote_file_name: (
            str | None
        ) = "{run_name}/torch_memory_traces/rank{rank}.{batch}.pt.memory_trace.html",
        torch_prof_overwrite: bool = False,
        torch_prof_use_gzip: bool = False,
        torch_prof_record_shapes: bool = False,
        torch_prof_profile_memory: bool = True,
        torch_prof_with_stack: bool = False,
        torch_prof_with_flops: bool = True,
        torch_prof_num_traces_to_keep: int = -1,
    ) -> None:
        has_timeline = torch_prof_memory_filename is not None
        if has_timeline and not (torch_prof_record_shapes and torch_prof_profile_memory and torch_prof_with_stack):
            raise ValueError(
                f"torch_prof_memory_filename={torch_prof_memory_filename!r} needs shapes, memory and stacks. Also pass "
                "torch_prof_record_shapes=True, torch_prof_profile_memory=True and torch_prof_with_stack=True."
            )
        self.schedule = schedule
        self.trace_handlers = trace_handlers
        self.resumption_batch_idx = 0
        self.remote_filenames: list[str] = []
        self._state: State | None = None
        self._markers: dict[str, Marker] = {}
        self._callbacks: list[Callback] = []
        for handler in (each for each in self.trace_handlers if isinstance(each, JSONTraceHandler)):
            handler.remote_file_name = self._note_remote(handler.remote_file_name)
            handler.merged_trace_remote_file_name = self._note_remote(handler.merged_trace_remote_file_name)
        if any((sys_prof_cpu, sys_prof_memory, sys_prof_disk, sys_prof_net)):
            self._callbacks.append(
                SystemProfiler(
                    profile_cpu=sys_prof_cpu,
                    profile_memory=sys_prof_memory,
                    profile_disk=sys_prof_disk,
                    profile_net=sys_prof_net,
                    stats_thread_interval_seconds=sys_prof_stats_thread_interval_seconds,
                )
            )
        if any((torch_prof_record_shapes, torch_prof_profile_memory, torch_prof_with_stack, torch_prof_with_flops)):
            self._callbacks.append(
                TorchProfiler(
                    folder=torch_prof_folder,
                    filename=torch_prof_filename,
                    remote_file_name=self._note_remote(torch_prof_remote_file_name),
                    memory_filename=torch_prof_memory_filename,
                    memory_remote_file_name=(
                        self._note_remote(torch_prof_memory_remote_file_name) if has_timeline else None
                    ),
                    overwrite=torch_prof_overwrite,
                    use_gzip=torch_prof_use_gzip,
                    record_shapes=torch_prof_record_shapes,
                    profile_memory=torch_prof_profile_memory,
                    with_stack=torch_prof_with_stack,
                    with_flops=torch_prof_with_flops,
                    num_traces_to_keep=torch_prof_num_traces_to_keep,
                )
            )

    @property
    def trace_handlers(self) -> list[TraceHandler]:
        """The trace handlers."""
        return self._trace_handlers

    @trace_handlers.setter
    def trace_handlers(self, trace_handlers: TraceHandler | Sequence[TraceHandler]) -> None:
        self._trace_handlers = list(ensure_tuple(trace_handlers))

    @property
    def state(self) -> State:
        """The state of training.

        Raises:
            RuntimeError: If the profiler has not been given to a Trainer yet.
        """
        if self._state is None:
            raise RuntimeError(
                "The profiler is bound to no state. Give it to a Trainer as profiler=..., or call bind_to_state(state)."
            )
        return self._state

    @property
    def timestamp(self) -> Timestamp:
        """The time in training."""
        return self.state.timestamp

    @property
    def action(self) -> ProfilerAction:
        """The action for the current batch.

        Raises:
            TypeError: If the schedule returned neither an action nor its name, such as `None`.
            ValueError: If it returned an unknown name.
        """
        answer = self.schedule(self.state)
        try:
            return ProfilerAction(answer)
        except (TypeError, ValueError) as error:
            raise type(error)(f"The schedule of the Profiler has returned {answer!r}: {error}") from None

    def bind_to_state(self, state: State) -> None:
        """Add the profiler, its own callbacks and its trace handlers to the state's callbacks."""
        self._state = state
        # Handlers come last, after the callbacks whose records of the same event they receive.
        state.callbacks.extend([self, *self._callbacks, *self._trace_handlers])

    def after_load(self, state: State, logger: Logger) -> None:
        """Record the batch at which training resumes."""
        self.resumption_batch_idx = state.timestamp.num_batches_in_epoch

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Start the schedules of later epochs at their first batch."""
        self.resumption_batch_idx = 0

    def marker(
        self,
        name: str,
        actions: Sequence[ProfilerAction] = _RECORDED,
        record_instant_on_start: bool = False,
        record_instant_on_finish: bool = False,
        categories: Sequence[str] = (),
    ) -> Marker:
        """Return the marker with the given name, which is created on first use.

        Args:
            name: Name in the trace.
            actions: Actions of the profiler in which the marker records.
            record_instant_on_start: Whether to also record an instant when the work begins.
            record_instant_on_finish: Whether to also record an instant when it ends.
            categories: Categories in the trace.

        Raises:
            RuntimeError: If the profiler has not been given to a Trainer yet.
        """
        marker = self._markers.get(name)
        if marker is None:
            _ = self.state  # raises here, where a missing Trainer is easy to see, instead of at the first span
            marker = self._markers[name] = Marker(
                self,
                name,
                actions=actions,
                record_instant_on_start=record_instant_on_start,
                record_instant_on_finish=record_instant_on_finish,
                categories=categories,
            )
        return marker

    def end_open_spans(self) -> None:
        """Record the ends of spans interrupted by an exception, innermost first.

        The Trainer calls it when training, an evaluation or a prediction fails, since the events that would end the
        spans no longer run. A marker of the user that encloses all of them stays open.
        """
        now_ns = time.time_ns()  # one time for all, so that inner spans do not end after outer ones
        is_open = [marker for marker in self._markers.values() if marker.is_open]
        begin_ns = min((marker.begin_ns for marker in is_open if marker.name.startswith(_EVENTS)), default=now_ns)
        for marker in sorted(is_open, key=lambda marker: -marker.begin_ns):
            if marker.begin_ns >= begin_ns:
                marker.cut_off(now_ns)

    def record_chrome_json_trace_file(self, filepath: str) -> None:
        """Pass a trace file to the handlers.

        Args:
            filepath: A file in Chrome's format, possibly compressed by gzip.
        """
        for handler in self._trace_handlers:
            handler.process_chrome_json_trace_file(filepath)

    def _note_remote(self, name: Any) -> Any:
        """Record the remote location of a file, and return its name there."""
        if name is None:
            return None
        self.remote_filenames.append(name)
        return parse_uri(name).path
