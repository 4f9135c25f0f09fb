"""Traces in Chrome's JSON format, which https://ui.perfetto.dev and chrome://tracing show."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from composer.loggers._logged_values import as_number
from composer.profiler._trace_files import (
    RECORDING,
    append_events,
    describes_process,
    describes_thread,
    durations,
    prepare_folder,
    process_facts,
    prune,
    warn_of_no_trace,
)
from composer.profiler.json_trace_merger import extend_trace, merge_traces, read_trace
from composer.profiler.trace_handler import TraceHandler
from composer_dist import dist
from composer_events.arguments import check_counts, check_flags, check_places, check_texts
from composer_events.event import ProfilerAction
from composer_events.formatting import (
    OF_TIME,
    check_placeholders,
    format_name_with_dist,
    format_name_with_dist_and_time,
)

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State
    from composer_time import Timestamp

__all__ = ["JSONTraceHandler"]

_log = logging.getLogger(__name__)


class JSONTraceHandler(TraceHandler):
    """Write the records of a `Profiler` as JSON: a file for each rank and cycle, and a merged file for each node.

    A file is written at the end of the last batch of its cycle. The end of an enclosing span, such as `event/epoch`, is
    written later: to the file of the next cycle or, at the end of `fit`, to the last file. Loggers that keep files
    receive each file when it is complete, and the merged file, with the ends of all spans, each time it has grown.

    If an exception ends training, open spans in the last files end there, and an unfinished cycle leaves no file. If it
    was the first cycle, a file with the events recorded so far is written, or a warning is logged if there are none.
    It is merged only if the node has one rank; with several, each rank writes its own file without waiting for others.

    Args:
        folder: Folder of the files, with the placeholders of `format_name_with_dist`.
        filename: Name of each rank's file, also with placeholders of time.
        remote_file_name: Its name for loggers that keep files; `None` uploads nothing.
        merged_trace_filename: Name of the file with all ranks and cycles; `None` for none.
        merged_trace_remote_file_name: Its name for loggers that keep files.
        overwrite: Whether the folder may contain files of an earlier run.
        num_traces_to_keep: Number of the latest cycles whose files are kept on disk; -1 for all. The merged file
            always has all cycles.

    Attributes:
        saved_traces: Files of this rank, oldest first.
        merged_trace: Merged file of this node's ranks, if this rank has written it.

    Raises:
        FileExistsError: If the folder is not empty at the start of training.
        RuntimeError: If the Trainer has no profiler.
        TypeError: If an argument has the wrong type.
        ValueError: If `num_traces_to_keep` is less than -1, or the files of the ranks have the name of the merged one.
    """

    def __init__(
        self,
        folder: str = "{run_name}/traces",
        filename: str = "ep{epoch}-ba{batch}-rank{rank}.json",
        remote_file_name: str | None = "{run_name}/traces/ep{epoch}-ba{batch}-rank{rank}.json",
        merged_trace_filename: str | None = "merged_trace.json",
        merged_trace_remote_file_name: str | None = "{run_name}/traces/merged_trace.json",
        *,
        overwrite: bool = False,
        num_traces_to_keep: int = -1,
    ) -> None:
        check_places(folder=folder)
        check_texts(filename=filename)
        check_texts(
            remote_file_name=remote_file_name,
            merged_trace_filename=merged_trace_filename,
            merged_trace_remote_file_name=merged_trace_remote_file_name,
            may_be_none=True,
        )
        check_placeholders(
            folder=folder,
            merged_trace_filename=merged_trace_filename,
            merged_trace_remote_file_name=merged_trace_remote_file_name,
        )
        check_placeholders(OF_TIME, filename=filename, remote_file_name=remote_file_name)
        check_flags(overwrite=overwrite)
        check_counts(-1, num_traces_to_keep=num_traces_to_keep)
        if filename == merged_trace_filename:
            raise ValueError(
                f"filename={filename!r} is merged_trace_filename, too, and one would overwrite the other. Give the "
                "files of the ranks another name, such as 'ba{batch}-rank{rank}.json'."
            )
        self.folder = folder
        self.filename = filename
        self.remote_file_name = remote_file_name
        self.merged_trace_filename = merged_trace_filename
        self.merged_trace_remote_file_name = merged_trace_remote_file_name
        self.overwrite = overwrite
        self.num_traces_to_keep = num_traces_to_keep
        self.saved_traces: list[str] = []
        self.merged_trace: str | None = None
        self._queue: SimpleQueue[dict[str, Any]] = SimpleQueue()  # thread-safe: the system profiler also records
        self._spans = OpenSpans()
        self._facts: list[dict[str, Any]] = []
        self._unfinished: Path | None = None  # the file of the last cycle, until open spans have ended
        self._remote: str | None = None  # its name for loggers
        self._is_described = False
        self._saves = self._has_saved = False
        self._is_training = self._has_recorded = False

    def init(self, state: State, logger: Logger) -> None:
        """Create the folder, and delete an old merged file. Every rank must call this."""
        folder = self._folder(state)
        prepare_folder(folder, overwrite=self.overwrite)
        if self.merged_trace_filename is not None and dist.get_local_rank() == 0:
            self._merged(state).unlink(missing_ok=True)
        dist.barrier()  # no rank may merge before the old file is deleted

    def fit_start(self, state: State, logger: Logger) -> None:
        """Record that training has started, so that `close` can detect a failure."""
        self._is_training = True

    def batch_start(self, state: State, logger: Logger) -> None:
        """Record the action for this batch. Every rank must call this."""
        if state.profiler is None:
            raise RuntimeError(
                "A JSONTraceHandler needs a profiler, and the Trainer has none. Give it to one: "
                "Trainer(profiler=Profiler(schedule, trace_handlers=[JSONTraceHandler()]))."
            )
        action = state.profiler.action
        if action is not ProfilerAction.SKIP and not self._is_described:
            self._describe_process()
        self._is_described = action is not ProfilerAction.SKIP
        self._saves = action is ProfilerAction.ACTIVE_AND_SAVE
        self._has_recorded = self._has_recorded or action in RECORDING

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write the recorded events, if a cycle ends. Every rank must call this."""
        if not self._saves:
            return
        self._saves = False
        self._is_described = False  # each file needs its own description, even if cycles follow without a pause
        self._hand_over(logger)
        path = self._save(state)
        if self.merged_trace_filename is not None:
            self._merge(path, state, logger)
        prune(self.saved_traces, self.num_traces_to_keep or 1)  # open spans of the latest file end in it later

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write the ends of open spans, or warn if no cycle has finished. Every rank must call this."""
        self._is_training = False
        if self._unfinished is not None:
            self._write_ends(self._unfinished, state, logger)
            self._hand_over(logger)
        if not self._has_saved and not self._queue.empty():
            _log.warning(
                "No trace was written to %s: training has ended before a cycle of the schedule did. Train longer, or "
                "give cyclic_schedule() fewer batches.",
                self._folder(state),
            )

    def close(self, state: State, logger: Logger) -> None:
        """Write the ends of spans after an exception, without collectives, since other ranks may be gone."""
        is_first = self._is_training and not self._has_saved
        self._is_training = False
        if is_first and self._has_recorded:
            path = self._save(state)
            if self.merged_trace_filename is not None and dist.get_local_world_size() == 1:
                self._merge_here([os.fspath(path)], state)
        elif is_first:
            warn_of_no_trace(self._folder(state), state)
        if self._unfinished is None:
            return
        ends, _ = self._spans.take_ends(self._queued())
        now_us = time.time_ns() // 1000
        ends += self._spans.end_all(now_us)
        if self._unfinished.exists():
            append_events(os.fspath(self._unfinished), ends)
        self._hand_over(logger)
        if self.merged_trace is None:
            return
        # The merged file also has open spans of other ranks, which cannot end them: only this rank writes the file.
        spans = OpenSpans()
        for event in durations(self.merged_trace):
            spans.note(event)
        own, _ = spans.take_ends(ends)
        append_events(self.merged_trace, [*own, *spans.end_all(max([end["ts"] for end in own], default=now_us))])
        self._upload_merged(logger)

    def process_duration_event(
        self,
        name: str,
        categories: Sequence[str],
        is_start: bool,
        timestamp: Timestamp,
        wall_clock_time_ns: int,
    ) -> None:
        """Record the beginning or the end of a span."""
        when = {"epoch": timestamp.num_epochs, "batch": timestamp.num_batches}
        self._record(name, categories, "B" if is_start else "E", wall_clock_time_ns, args=when)

    def process_instant_event(
        self, name: str, categories: Sequence[str], timestamp: Timestamp, wall_clock_time_ns: int
    ) -> None:
        """Record an event without duration."""
        when = {"epoch": timestamp.num_epochs, "batch": timestamp.num_batches}
        self._record(name, categories, "i", wall_clock_time_ns, args=when, s="p")

    def process_counter_event(
        self,
        name: str,
        categories: Sequence[str],
        timestamp: Timestamp,
        wall_clock_time_ns: int,
        values: Mapping[str, int | float],
    ) -> None:
        """Record values over time. Non-finite values are dropped, since JSON cannot represent them."""
        finite = {key: number for key, value in values.items() if (number := _finite(value)) is not None}
        if finite:
            self._record(name, categories, "C", wall_clock_time_ns, args=finite)

    def process_chrome_json_trace_file(self, filepath: str) -> None:
        """Add the events of a trace file to this rank's own.

        Raises:
            TypeError: If the file is not a trace.
        """
        rank, tid = dist.get_global_rank(), os.getpid()
        for event in read_trace(filepath):
            # This rank and its thread already have more descriptive names than those in the file.
            if not describes_process(event) and not describes_thread(event, tid):
                event["pid"] = rank  # viewers group events by process
                self._queue.put(event)

    def _record(self, name: str, categories: Sequence[str], phase: str, time_ns: int, **more: Any) -> None:
        # On Linux, the id of the main thread is that of the process, so torch's events of this thread, which have the
        # system's thread id, are in the same row.
        self._queue.put(
            {
                "name": name,
                "cat": ",".join(categories),
                "ph": phase,
                "ts": time_ns // 1000,
                "pid": dist.get_global_rank(),
                "tid": os.getpid(),
                **more,
            }
        )

    def _describe_process(self) -> None:
        """Record the rank, and the time of an instant common to all ranks, to align their clocks."""
        rank = dist.get_global_rank()
        dist.barrier()  # the ranks start together, so that the interval below is short
        begin_ns = time.time_ns()
        dist.barrier()
        end_ns = time.time_ns()  # the last rank reached the second barrier in between
        facts: dict[str, dict[str, Any]] = {
            **process_facts(rank),
            "thread_name": {"name": "Training Loop"},
            "thread_sort_index": {"sort_index": 0},
            "global_rank": {"value": rank},
            "clock_sync_timestamp_us": {"value": (begin_ns + end_ns) // 2000},
            "clock_sync_error_bound": {"value": (end_ns - begin_ns) // 1000},
        }
        self._facts = [
            {"name": name, "ph": "M", "pid": rank, "tid": os.getpid(), "args": args} for name, args in facts.items()
        ]
        for fact in self._facts:
            self._queue.put(fact)

    def _save(self, state: State) -> Path:
        """Write the recorded events to a new file, and return its path. Ends of spans may be added later."""
        stamp = state.timestamp
        path = self._folder(state) / format_name_with_dist_and_time(self.filename, state.run_name, stamp)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write(path)
        if self.remote_file_name is not None:
            self._remote = format_name_with_dist_and_time(self.remote_file_name, state.run_name, stamp)
        if os.fspath(path) in self.saved_traces:  # a name without placeholders of time is reused
            self.saved_traces.remove(os.fspath(path))
        self.saved_traces.append(os.fspath(path))
        self._has_saved = True
        self._unfinished = path
        return path

    def _write(self, path: Path) -> None:
        with open(path, "w") as file:
            separator = "[\n"
            for event in self._queued():
                if self._spans.note(event):  # an end without a begin would confuse viewers
                    file.write(separator + json.dumps(event))
                    separator = ",\n"
            file.write("[]\n" if separator == "[\n" else "\n]\n")

    def _write_ends(self, path: Path, state: State, logger: Logger) -> None:
        """Add the ends of spans that began in the files to the last and the merged file."""
        ends, others = self._spans.take_ends(self._queued())
        for event in others:  # keep them, since another `fit` may save them
            self._queue.put(event)
        if path.exists():
            append_events(os.fspath(path), ends)
        if self.merged_trace_filename is not None:
            loose = path.with_name(f".{path.name}.ends")
            # With the facts, by which the merger identifies the rank and aligns the clock.
            loose.write_text(json.dumps([*self._facts, *ends]))
            for name in self._merge(loose, state, logger):
                os.unlink(name)

    def _hand_over(self, logger: Logger) -> None:
        """Upload the completed file of the last cycle, and prune old files."""
        if self._remote is not None and self._unfinished is not None and self._unfinished.exists():
            logger.upload_file(self._remote, self._unfinished, overwrite=self.overwrite)
        self._unfinished = self._remote = None
        prune(self.saved_traces, self.num_traces_to_keep)

    def _queued(self) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(Empty):
            while True:
                yield self._queue.get_nowait()

    def _merge(self, path: Path, state: State, logger: Logger) -> list[str]:
        """Merge the files of the node's ranks on local rank 0, and return them there. Every rank must call this."""
        nodes_and_paths = dist.all_gather_object((dist.get_node_rank(), os.fspath(path)))
        dist.barrier()  # all files are written
        if dist.get_local_rank() != 0:
            return []
        inputs = [name for node, name in nodes_and_paths if node == dist.get_node_rank()]
        self._merge_here(inputs, state)
        self._upload_merged(logger)
        return inputs

    def _merge_here(self, inputs: Sequence[str], state: State) -> None:
        merged = self._merged(state)
        if merged.exists():
            extend_trace(os.fspath(merged), *inputs)
        else:
            # Renamed when complete, so that a reader never sees a partial file.
            unfinished = merged.with_name(f".{merged.name}.unfinished")
            merge_traces(os.fspath(unfinished), *inputs)
            unfinished.replace(merged)
        self.merged_trace = os.fspath(merged)

    def _upload_merged(self, logger: Logger) -> None:
        if self.merged_trace is not None and self.merged_trace_remote_file_name is not None:
            logger.upload_file(self.merged_trace_remote_file_name, self.merged_trace, overwrite=True)

    def _folder(self, state: State) -> Path:
        return Path(format_name_with_dist(self.folder, state.run_name))

    def _merged(self, state: State) -> Path:
        assert self.merged_trace_filename is not None
        path = self._folder(state) / format_name_with_dist(self.merged_trace_filename, state.run_name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _finite(value: Any) -> float | None:
    number = value if type(value) is int else as_number(value)
    return number if number is not None and math.isfinite(number) else None


class OpenSpans:
    """Tracker of the spans that have begun in a file but not ended.

    Example:
        >>> spans = OpenSpans()
        >>> spans.note({"name": "fit", "ph": "B", "ts": 1}), spans.note({"name": "epoch", "ph": "B", "ts": 2})
        (True, True)
        >>> later = [{"name": "batch", "ph": "B", "ts": 3}, {"name": "batch", "ph": "E", "ts": 4}]
        >>> ends, others = spans.take_ends([*later, {"name": "fit", "ph": "E", "ts": 5}])
        >>> [(end["name"], end["ts"]) for end in ends], others == later
        ([('epoch', 5), ('fit', 5)], True)
    """

    def __init__(self) -> None:
        self._open: list[dict[str, Any]] = []  # begin events, outermost first

    def note(self, event: dict[str, Any]) -> bool:
        """Track an event to be written. Return false for an end without an open begin event."""
        if event.get("ph") == "B":
            self._open.append(event)
        elif event.get("ph") == "E":
            begin = _begin_of(event, self._open)
            if begin is None:
                return False
            self._open.pop(begin)
        return True

    def take_ends(self, events: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Separate the ends of open spans from all other events.

        Spans inside of an ending one that have no end of their own, such as an epoch interrupted by the end of
        training, end with it.
        """
        ends: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        begun: list[dict[str, Any]] = []
        for event in events:
            # An end belongs to the latest begin event of its name, which may not be written yet.
            unwritten = _begin_of(event, begun) if event.get("ph") == "E" else None
            if event.get("ph") == "E" and unwritten is None and _begin_of(event, self._open) is not None:
                ends.append(event)
                continue
            if event.get("ph") == "B":
                begun.append(event)
            elif unwritten is not None:
                begun.pop(unwritten)
            others.append(event)
        return list(self._with_inner(ends)), others

    def end_all(self, time_us: int) -> list[dict[str, Any]]:
        """Close all open spans, and return their ends, innermost first.

        Args:
            time_us: Time of the ends, in microseconds since 1970.
        """
        ends = [
            {key: begin[key] for key in ("name", "cat", "pid", "tid") if key in begin} | {"ph": "E", "ts": time_us}
            for begin in reversed(self._open)
        ]
        self._open.clear()
        return ends

    def _with_inner(self, ends: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        """Yield the ends, each preceded by ends for inner spans that have none, and close all of these spans."""
        for position, end in enumerate(ends):
            begin = _begin_of(end, self._open)
            if begin is None:
                continue
            own_ends = ends[position + 1 :]
            for inner in reversed(range(begin + 1, len(self._open))):
                span = self._open[inner]
                if _is_same_thread(span, end) and _begin_of(span, own_ends) is None:
                    yield {**end, **{key: span[key] for key in ("name", "cat") if key in span}}
                    self._open.pop(inner)
            self._open.pop(begin)
            yield end


def _begin_of(event: dict[str, Any], events: list[dict[str, Any]]) -> int | None:
    """Return the index of the latest event of the same span, or `None`."""
    for place in reversed(range(len(events))):
        if events[place].get("name") == event.get("name") and _is_same_thread(events[place], event):
            return place
    return None


def _is_same_thread(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (one.get("pid"), one.get("tid")) == (other.get("pid"), other.get("tid"))
