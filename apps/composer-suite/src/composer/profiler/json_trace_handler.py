"""Traces in Chrome's JSON format, which https://ui.perfetto.dev and chrome://tracing show."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from composer.loggers._service_queue import as_number
from composer.profiler.json_trace_merger import (
    describes_process,
    extend_trace,
    merge_traces,
    process_facts,
    read_trace,
)
from composer.profiler.trace_handler import TraceHandler, profiler_of
from composer_checkpoint.save_folder import ensure_folder_is_empty
from composer_dist import dist
from composer_events.arguments import check_counts, check_flags
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
_RECORDING = (ProfilerAction.ACTIVE, ProfilerAction.ACTIVE_AND_SAVE)  # not warmup, whose events are discarded


class JSONTraceHandler(TraceHandler):
    """Write the records of a `Profiler` as JSON: a file for each rank and cycle, and a merged file for each node.

    A file is written at the end of the last batch of its cycle, and spans that are still open, such as `event/epoch`,
    end there. Loggers that keep files receive each file, and the merged file each time it has grown.

    If an exception ends training, an unfinished cycle leaves no file, unless it is the first one. It is merged only if
    the node has one rank; with several, each rank writes its own file without waiting for others.

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
        self._is_described = self._saves = self._has_saved = False
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
        action = profiler_of(state, self).action
        if action is not ProfilerAction.SKIP and not self._is_described:
            self._describe_process()
        self._is_described = action is not ProfilerAction.SKIP
        self._saves = action is ProfilerAction.ACTIVE_AND_SAVE
        self._has_recorded = self._has_recorded or action in _RECORDING

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write the recorded events, if a cycle ends. Every rank must call this."""
        if not self._saves:
            return
        self._saves = False
        self._is_described = False  # each file needs its own description, even if cycles follow without a pause
        path = self._save(state, logger)
        if self.merged_trace_filename is not None:
            nodes_and_paths = dist.all_gather_object((dist.get_node_rank(), os.fspath(path)))
            dist.barrier()  # all files are written
            if dist.get_local_rank() == 0:
                self._merge([name for node, name in nodes_and_paths if node == dist.get_node_rank()], state, logger)
            if self.num_traces_to_keep == 0:
                dist.barrier()  # `prune` would delete a file that is being merged
        prune(self.saved_traces, self.num_traces_to_keep)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Warn if no cycle has finished."""
        self._is_training = False
        if not self._has_saved and not self._queue.empty():
            _log.warning(
                "No trace was written to %s: training has ended before a cycle of the schedule did. Train longer, or "
                "give cyclic_schedule() fewer batches.",
                self._folder(state),
            )

    def close(self, state: State, logger: Logger) -> None:
        """Write what a failed first cycle has recorded, without collectives, since other ranks may be gone."""
        if self._is_training and self._has_recorded and not self._has_saved:
            path = self._save(state, logger)
            if self.merged_trace_filename is not None and dist.get_local_world_size() == 1:
                self._merge([os.fspath(path)], state, logger)
        self._is_training = False

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
            describes_thread = event.get("ph") == "M" and str(event.get("name")).startswith("thread_")
            if not describes_process(event) and not (describes_thread and event.get("tid") == tid):
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
        for name, args in facts.items():
            self._queue.put({"name": name, "ph": "M", "pid": rank, "tid": os.getpid(), "args": args})

    def _save(self, state: State, logger: Logger) -> Path:
        """Write the recorded events to a new file, upload it, and return its path."""
        stamp = state.timestamp
        path = self._folder(state) / format_name_with_dist_and_time(self.filename, state.run_name, stamp)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w") as file:
            separator = "[\n"
            for event in self._whole_spans():
                file.write(separator + json.dumps(event))
                separator = ",\n"
            file.write("[]\n" if separator == "[\n" else "\n]\n")
        if self.remote_file_name is not None:
            name = format_name_with_dist_and_time(self.remote_file_name, state.run_name, stamp)
            logger.upload_file(name, path, overwrite=self.overwrite)
        if os.fspath(path) in self.saved_traces:  # a name without placeholders of time is reused
            self.saved_traces.remove(os.fspath(path))
        self.saved_traces.append(os.fspath(path))
        self._has_saved = True
        return path

    def _whole_spans(self) -> Iterator[dict[str, Any]]:
        """Yield the recorded events, without ends of spans in earlier files, and ends of spans that are still open."""
        begun: list[dict[str, Any]] = []
        with contextlib.suppress(Empty):
            while True:
                event = self._queue.get_nowait()
                if event.get("ph") == "B":
                    begun.append(event)
                elif event.get("ph") == "E":
                    own = [begin for begin in begun if _span_of(begin) == _span_of(event)]
                    if not own:  # an end without a beginning would confuse viewers
                        continue
                    begun.remove(own[-1])
                yield event
        now_us = time.time_ns() // 1000
        for begin in reversed(begun):
            yield {**begin, "ph": "E", "ts": now_us}

    def _merge(self, inputs: Sequence[str], state: State, logger: Logger) -> None:
        """Add files to the merged file, and upload it."""
        merged = self._merged(state)
        if merged.exists():
            extend_trace(os.fspath(merged), *inputs)
        else:
            # Renamed when complete, so that a reader never sees a partial file.
            unfinished = merged.with_name(f".{merged.name}.unfinished")
            merge_traces(os.fspath(unfinished), *inputs)
            unfinished.replace(merged)
        self.merged_trace = os.fspath(merged)
        if self.merged_trace_remote_file_name is not None:
            logger.upload_file(self.merged_trace_remote_file_name, self.merged_trace, overwrite=True)

    def _folder(self, state: State) -> Path:
        return Path(format_name_with_dist(self.folder, state.run_name))

    def _merged(self, state: State) -> Path:
        assert self.merged_trace_filename is not None
        path = self._folder(state) / format_name_with_dist(self.merged_trace_filename, state.run_name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _span_of(event: dict[str, Any]) -> tuple[Any, ...]:
    return event.get("name"), event.get("pid"), event.get("tid")


def _finite(value: Any) -> float | None:
    number = value if type(value) is int else as_number(value)
    return number if number is not None and math.isfinite(number) else None


def prepare_folder(folder: Path, *, overwrite: bool) -> None:
    """Create a folder, which must be empty unless files may be overwritten. Every rank must call this."""
    folder.mkdir(parents=True, exist_ok=True)
    if not overwrite:
        ensure_folder_is_empty(folder)
    dist.barrier()  # no rank may write before all of them have checked


def prune(paths: list[str], num_to_keep: int) -> None:
    """Delete the oldest files until `num_to_keep` are left; keep all if it is negative."""
    while 0 <= num_to_keep < len(paths):
        Path(paths.pop(0)).unlink(missing_ok=True)
