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
    """Writes what a `Profiler` records as JSON: a file for each rank and cycle, and one for all of a node's together.

    A file is written at the end of its cycle's last batch. Spans around it, such as `event/epoch`, end later: in the
    next cycle's file or, when `fit` is over, in the last one. Loggers that keep files get each when nothing more comes
    into it, and the merged one, which has all ends, each time that it has grown.

    Where an exception ends training, what is open in the last files ends then, and a cycle that was not finished leaves
    none. If it was the first one, there is a file of what was recorded all the same, or a line in the log that says why
    not. It is merged where a node has one rank; of several, each writes its own, without waiting for the others.

    Args:
        folder: Where to, with the placeholders of `format_name_with_dist`.
        filename: What each rank's file is called there, also with those of the time.
        remote_file_name: Its name where a logger keeps files; `None` keeps it here only.
        merged_trace_filename: What the file with all ranks and cycles is called; `None` for none.
        merged_trace_remote_file_name: Its name where a logger keeps files.
        overwrite: Whether the folder may hold files of an earlier run.
        num_traces_to_keep: How many of the latest cycles' files stay on the disk; -1 for all. The merged one has
            all cycles anyway.

    Attributes:
        saved_traces: This rank's files, oldest first.
        merged_trace: The file of this node's ranks together, where this rank has written one.

    Raises:
        FileExistsError: If the folder is not empty, when training begins.
        RuntimeError: If there is no profiler to hear from.
        TypeError: If an argument is of another kind.
        ValueError: If `num_traces_to_keep` is less than -1, or if the files of the ranks are called as the merged one.
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
        self._queue: SimpleQueue[dict[str, Any]] = SimpleQueue()  # other threads record, too
        self._spans = OpenSpans()
        self._facts: list[dict[str, Any]] = []
        self._unfinished: Path | None = None  # the last cycle's file, while ends may come
        self._remote: str | None = None  # what it is going to be called elsewhere
        self._is_described = False
        self._saves = self._has_saved = False
        self._is_training = self._has_recorded = False

    def init(self, state: State, logger: Logger) -> None:
        """Make the folder. Every rank must call this."""
        folder = self._folder(state)
        prepare_folder(folder, overwrite=self.overwrite)
        if self.merged_trace_filename is not None and dist.get_local_rank() == 0:
            self._merged(state).unlink(missing_ok=True)
        dist.barrier()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Note that training begins, which says at the end whether it was cut off."""
        self._is_training = True

    def batch_start(self, state: State, logger: Logger) -> None:
        """Note what is done with the batch. Every rank must call this."""
        if state.profiler is None:
            raise RuntimeError(
                "A JSONTraceHandler hears from a profiler, and there is none. Give it to one: "
                "Trainer(profiler=Profiler(schedule, trace_handlers=[JSONTraceHandler()]))."
            )
        action = state.profiler.action
        if action is not ProfilerAction.SKIP and not self._is_described:
            self._describe_process()
        self._is_described = action is not ProfilerAction.SKIP
        self._saves = action is ProfilerAction.ACTIVE_AND_SAVE
        self._has_recorded = self._has_recorded or action in RECORDING

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write what was recorded, if a cycle ends. Every rank must call this."""
        if not self._saves:
            return
        self._saves = False
        self._is_described = False  # each file says whose it is, also where no pause comes before
        self._hand_over(logger)
        path = self._save(state)
        if self.merged_trace_filename is not None:
            self._merge(path, state, logger)
        prune(self.saved_traces, self.num_traces_to_keep or 1)  # this one stays until it is complete

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write the ends of what has begun in a cycle; say so if there was none. Every rank must call this."""
        self._is_training = False
        if self._unfinished is not None:
            self._write_ends(self._unfinished, state, logger)
            self._hand_over(logger)
        if not self._has_saved and not self._queue.empty():
            _log.warning(
                "There is no trace in %s: training has ended before a cycle of the schedule did. Train longer, or give "
                "cyclic_schedule() fewer batches.",
                self._folder(state),
            )

    def close(self, state: State, logger: Logger) -> None:
        """Write the ends of what an exception has cut off, without the other ranks, which may be gone."""
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
        spans = OpenSpans()  # the other ranks' too: none of them writes to this file
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
        """Take the begin or the end of a span."""
        when = {"epoch": timestamp.num_epochs, "batch": timestamp.num_batches}
        self._record(name, categories, "B" if is_start else "E", wall_clock_time_ns, args=when)

    def process_instant_event(
        self, name: str, categories: Sequence[str], timestamp: Timestamp, wall_clock_time_ns: int
    ) -> None:
        """Take what has no duration."""
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
        """Take numbers that change over time; JSON has none that are not finite, and viewers draw nothing else."""
        finite = {key: number for key, value in values.items() if (number := _finite(value)) is not None}
        if finite:
            self._record(name, categories, "C", wall_clock_time_ns, args=finite)

    def process_chrome_json_trace_file(self, filepath: str) -> None:
        """Add the events of a trace that somebody else wrote to this rank's own.

        Raises:
            TypeError: If the file holds no trace.
        """
        rank, tid = dist.get_global_rank(), os.getpid()
        for event in read_trace(filepath):
            # The rank and its thread have better names already than those of the program.
            if not describes_process(event) and not describes_thread(event, tid):
                event["pid"] = rank  # where all that belongs to a rank is shown together
                self._queue.put(event)

    def _record(self, name: str, categories: Sequence[str], phase: str, time_ns: int, **more: Any) -> None:
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
        """Record who this is, and a moment that all ranks have in common, by which their clocks are compared."""
        rank = dist.get_global_rank()
        dist.barrier()
        begin_ns = time.time_ns()
        dist.barrier()
        end_ns = time.time_ns()  # somewhere between the two, the last rank came to the second barrier
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
        """Write what was recorded into a file of its own, to which ends may come, and return where it is."""
        stamp = state.timestamp
        path = self._folder(state) / format_name_with_dist_and_time(self.filename, state.run_name, stamp)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write(path)
        if self.remote_file_name is not None:
            self._remote = format_name_with_dist_and_time(self.remote_file_name, state.run_name, stamp)
        if os.fspath(path) in self.saved_traces:  # a name without the time, which is written each time
            self.saved_traces.remove(os.fspath(path))
        self.saved_traces.append(os.fspath(path))
        self._has_saved = True
        self._unfinished = path
        return path

    def _write(self, path: Path) -> None:
        with open(path, "w") as file:
            separator = "[\n"
            for event in self._queued():
                if self._spans.note(event):
                    file.write(separator + json.dumps(event))
                    separator = ",\n"
            file.write("[]\n" if separator == "[\n" else "\n]\n")

    def _write_ends(self, path: Path, state: State, logger: Logger) -> None:
        """Add the ends of spans that have begun in the files, and nothing else, to the last one and the merged one."""
        ends, others = self._spans.take_ends(self._queued())
        for event in others:  # a further `fit` may save them
            self._queue.put(event)
        if path.exists():
            append_events(os.fspath(path), ends)
        if self.merged_trace_filename is not None:
            loose = path.with_name(f".{path.name}.ends")
            loose.write_text(json.dumps([*self._facts, *ends]))
            for name in self._merge(loose, state, logger):
                os.unlink(name)

    def _hand_over(self, logger: Logger) -> None:
        """Give the last cycle's file, into which nothing more comes, to the loggers that keep files."""
        if self._remote is not None and self._unfinished is not None and self._unfinished.exists():
            logger.upload_file(self._remote, self._unfinished, overwrite=self.overwrite)
        self._unfinished = self._remote = None
        prune(self.saved_traces, self.num_traces_to_keep)

    def _queued(self) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(Empty):
            while True:
                yield self._queue.get_nowait()

    def _merge(self, path: Path, state: State, logger: Logger) -> list[str]:
        """Put the node's ranks' files together with those before, and return them on the rank that has done so."""
        nodes_and_paths = dist.all_gather_object((dist.get_node_rank(), os.fspath(path)))
        dist.barrier()
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
    """Follows the begins and ends of what is written, so that ends that come later find their begins.

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
        self._open: list[dict[str, Any]] = []  # the begins, outermost first

    def note(self, event: dict[str, Any]) -> bool:
        """Take what is about to be written; false if it ends what has not begun, or was ended for it."""
        if event.get("ph") == "B":
            self._open.append(event)
        elif event.get("ph") == "E":
            begin = _begin_of(event, self._open)
            if begin is None:
                return False
            self._open.pop(begin)
        return True

    def take_ends(self, events: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Part the ends of open spans from all other events.

        What is open inside of a span that ends, and has no end of its own, as an epoch that training left in its
        middle, ends with it.
        """
        ends: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        begun: list[dict[str, Any]] = []
        for event in events:
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
        """Return the ends of what is open, the innermost first; then nothing is.

        Args:
            time_us: When all of it ends, in microseconds since 1970.
        """
        ends = [
            {key: begin[key] for key in ("name", "cat", "pid", "tid") if key in begin} | {"ph": "E", "ts": time_us}
            for begin in reversed(self._open)
        ]
        self._open.clear()
        return ends

    def _with_inner(self, ends: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        """Yield ends, and before each those of spans inside of it that have none; then all of them are closed."""
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
    """Return the place of the latest event of the same span, if there is one."""
    for place in reversed(range(len(events))):
        if events[place].get("name") == event.get("name") and _is_same_thread(events[place], event):
            return place
    return None


def _is_same_thread(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (one.get("pid"), one.get("tid")) == (other.get("pid"), other.get("tid"))
