"""The profiler, which combines a schedule, sources of events and trace handlers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from composer.profiler.json_trace_handler import JSONTraceHandler
from composer.profiler.marker import Marker
from composer.profiler.system_profiler import SystemProfiler
from composer.profiler.torch_profiler import TorchProfiler
from composer.profiler.trace_handler import TraceHandler
from composer_checkpoint.remote.fetch import parse_uri
from composer_events.arguments import check_flags, check_texts
from composer_events.batches import ensure_tuple
from composer_events.callback import Callback
from composer_events.event import ProfilerAction
from composer_events.logger import Logger
from composer_events.state import State
from composer_time import Timestamp

__all__ = ["Profiler"]

_EVENTS = "event/"  # prefix of the engine's markers
_RECORDED = (ProfilerAction.WARMUP, ProfilerAction.ACTIVE, ProfilerAction.ACTIVE_AND_SAVE)


class Profiler(Callback):
    """Record where training spends its time, for `Trainer(profiler=...)`.

    By default, events of the engine, and each algorithm and callback on each of them, are recorded as spans. A
    `TorchProfiler` adds PyTorch's operators, and a `SystemProfiler` the system load. Trace handlers receive the
    records: a `JSONTraceHandler` writes files for https://ui.perfetto.dev, an `EventRecorder` accumulates a table.

    Args:
        schedule: Function of the state that returns the action for a batch, or its name; see `cyclic_schedule`.
        trace_handlers: One or several trace handlers.
        sys_prof_cpu: Record CPU utilization.
        sys_prof_memory: Record memory usage.
        sys_prof_disk: Record disk reads and writes.
        sys_prof_net: Record network traffic.
        sys_prof_stats_thread_interval_seconds: Interval between readings of these four, in seconds.
        torch_prof_folder: See `TorchProfiler`, as for all that start with `torch_prof_`.
        torch_prof_filename: See `TorchProfiler`.
        torch_prof_remote_file_name: See `TorchProfiler`.
        torch_prof_memory_filename: See `TorchProfiler`.
        torch_prof_memory_remote_file_name: See `TorchProfiler`.
        torch_prof_overwrite: See `TorchProfiler`.
        torch_prof_use_gzip: See `TorchProfiler`.
        torch_prof_record_shapes: See `TorchProfiler`.
        torch_prof_profile_memory: See `TorchProfiler`.
        torch_prof_with_stack: See `TorchProfiler`.
        torch_prof_with_flops: See `TorchProfiler`.
        torch_prof_num_traces_to_keep: See `TorchProfiler`.

    Attributes:
        schedule: As given.
        remote_filenames: Remote names or URIs of the files, as passed.
        resumption_batch_idx: Batch of the epoch at which training was resumed; schedules start there.

    Raises:
        TypeError: If an argument has the wrong type.
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
        if not callable(schedule):
            raise TypeError(f"schedule={schedule!r} must be a function of the state, such as cyclic_schedule().")
        check_flags(sys_prof_cpu=sys_prof_cpu, sys_prof_memory=sys_prof_memory)
        check_flags(sys_prof_disk=sys_prof_disk, sys_prof_net=sys_prof_net)
        check_texts(torch_prof_filename=torch_prof_filename)
        check_texts(
            torch_prof_remote_file_name=torch_prof_remote_file_name,
            torch_prof_memory_remote_file_name=torch_prof_memory_remote_file_name,
            may_be_none=True,
        )
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
        self._note_remotes_of_handlers()
        if sys_prof_cpu or sys_prof_memory or sys_prof_disk or sys_prof_net:
            self._callbacks.append(
                SystemProfiler(
                    profile_cpu=sys_prof_cpu,
                    profile_memory=sys_prof_memory,
                    profile_disk=sys_prof_disk,
                    profile_net=sys_prof_net,
                    stats_thread_interval_seconds=sys_prof_stats_thread_interval_seconds,
                )
            )
        if torch_prof_record_shapes or torch_prof_profile_memory or torch_prof_with_stack or torch_prof_with_flops:
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
        several = list(ensure_tuple(trace_handlers))
        for handler in several:
            if isinstance(handler, type) or not hasattr(handler, "process_duration_event"):
                hint = f" Call it: {handler.__name__}()." if isinstance(handler, type) else ""
                raise TypeError(f"trace_handlers holds {handler!r}, which is not a TraceHandler.{hint}")
        self._trace_handlers = several

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

    def _note_remotes_of_handlers(self) -> None:
        for handler in self.trace_handlers:
            if isinstance(handler, JSONTraceHandler):
                handler.remote_file_name = self._note_remote(handler.remote_file_name)
                handler.merged_trace_remote_file_name = self._note_remote(handler.merged_trace_remote_file_name)

    def _note_remote(self, name: Any) -> Any:
        """Record the remote location of a file, and return its name there."""
        if name is None:
            return None
        self.remote_filenames.append(name)
        return parse_uri(name).path
