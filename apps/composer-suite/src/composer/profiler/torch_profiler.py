"""Integration of PyTorch's profiler, which records operators on CPU and accelerator."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerAction as TorchAction

from composer.profiler._trace_files import open_name, prepare_folder, prune, warn_of_no_trace
from composer.profiler.json_trace_handler import JSONTraceHandler
from composer.profiler.utils import export_memory_timeline_html
from composer_dist import dist
from composer_events.arguments import check_counts, check_flags, check_places, check_texts
from composer_events.callback import Callback
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

__all__ = ["TorchProfiler"]

_log = logging.getLogger(__name__)
_NUM_ROWS = 20  # of each table of operators in the log
_ACTIONS = {
    ProfilerAction.SKIP: TorchAction.NONE,
    ProfilerAction.WARMUP: TorchAction.WARMUP,
    ProfilerAction.ACTIVE: TorchAction.RECORD,
    ProfilerAction.ACTIVE_AND_SAVE: TorchAction.RECORD_AND_SAVE,
}
_RECORDING = (TorchAction.RECORD, TorchAction.RECORD_AND_SAVE)


class TorchProfiler(Callback):
    """Run `torch.profiler` with the schedule of the `Profiler`, and add its events to the trace.

    An unfinished cycle leaves no file, unless an exception ends training in the first cycle: the events recorded so far
    are then saved, or a warning is logged if there are none.

    Args:
        folder: Folder of torch's own files, with the placeholders of `format_name_with_dist`.
        filename: Name of each file, also with placeholders of time.
        remote_file_name: Its name for loggers that keep files; `None` uploads nothing.
        memory_filename: Name of a page with the memory usage over time; it must end in `.html`, and needs
            `record_shapes`, `profile_memory`, `with_stack` and the package matplotlib. `None` for none.
        memory_remote_file_name: Its name for loggers that keep files.
        overwrite: Whether the folder may contain files of an earlier run.
        use_gzip: Whether to compress the files, whose names then end in `.gz`.
        record_shapes: Record the shapes of operators' inputs.
        profile_memory: Record allocations and frees.
        with_stack: Record the Python line that called each operator.
        with_flops: Estimate the floating point operations of matrix products and convolutions.
        num_traces_to_keep: Number of the latest files kept on disk; -1 for all.

    Attributes:
        saved_traces: The files, oldest first.

    Raises:
        FileExistsError: If the folder is not empty at the start of training.
        RuntimeError: If the Trainer has no profiler.
        TypeError: If an argument has the wrong type.
        ValueError: If the page's name does not end in `.html`.
    """

    def __init__(
        self,
        folder: str = "{run_name}/torch_traces",
        filename: str = "rank{rank}.{batch}.pt.trace.json",
        remote_file_name: str | None = "{run_name}/torch_traces/rank{rank}.{batch}.pt.trace.json",
        memory_filename: str | None = None,
        memory_remote_file_name: str | None = "{run_name}/torch_memory_traces/rank{rank}.{batch}.pt.trace.memory.html",
        overwrite: bool = False,
        use_gzip: bool = False,
        record_shapes: bool = False,
        profile_memory: bool = True,
        with_stack: bool = False,
        with_flops: bool = True,
        num_traces_to_keep: int = -1,
    ) -> None:
        check_places(folder=folder)
        check_texts(filename=filename)
        check_texts(
            remote_file_name=remote_file_name,
            memory_filename=memory_filename,
            memory_remote_file_name=memory_remote_file_name,
            may_be_none=True,
        )
        check_placeholders(folder=folder)
        check_placeholders(
            OF_TIME,
            filename=filename,
            remote_file_name=remote_file_name,
            memory_filename=memory_filename,
            memory_remote_file_name=memory_remote_file_name,
        )
        check_flags(overwrite=overwrite, use_gzip=use_gzip, record_shapes=record_shapes)
        check_flags(profile_memory=profile_memory, with_stack=with_stack, with_flops=with_flops)
        check_counts(-1, num_traces_to_keep=num_traces_to_keep)
        for name, value in (
            ("memory_filename", memory_filename),
            ("memory_remote_file_name", memory_filename and memory_remote_file_name),
        ):
            if value is not None and not value.endswith(".html"):
                raise ValueError(f"{name}={value!r} names a web page and has to end in '.html'.")
        ending = ".gz" if use_gzip else ""
        self.folder = folder
        self.filename = _ending(filename, ending)
        self.remote_file_name = None if remote_file_name is None else _ending(remote_file_name, ending)
        self.memory_filename = memory_filename
        self.memory_remote_file_name = memory_remote_file_name
        self.overwrite = overwrite
        self.record_shapes = record_shapes
        self.profile_memory = profile_memory
        self.with_stack = with_stack
        self.with_flops = with_flops
        self.num_traces_to_keep = num_traces_to_keep
        self.saved_traces: list[str] = []
        self.profiler: Any = None
        self._is_training = self._has_recorded = self._has_saved = False

    def init(self, state: State, logger: Logger) -> None:
        """Start torch's profiler. Every rank must call this."""
        if state.profiler is None:
            raise RuntimeError(
                "A TorchProfiler needs a profiler, and the Trainer has none. Give it a schedule: "
                "Trainer(profiler=Profiler(schedule, trace_handlers)), which makes a TorchProfiler itself."
            )
        prepare_folder(self._folder(state), overwrite=self.overwrite)

        def follow(step: int) -> TorchAction:
            del step  # counts the steps of torch's profiler; the schedule uses the batch of the epoch
            # The trace handlers write the saved trace next. Recording this work with stacks would make the next trace
            # many times larger, so recording resumes at the next batch.
            if self.profiler is not None and self.profiler.current_action is TorchAction.RECORD_AND_SAVE:
                return TorchAction.NONE
            return _ACTIONS[state.profiler.action]

        profiler = torch.profiler.profile(
            schedule=follow,
            on_trace_ready=lambda _: self._save(state, logger),
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
        )
        # Not a `with` block: the profiler stays active across events, until `close`.
        profiler.__enter__()
        self.profiler = profiler  # only once started: torch 2.11 crashes when an unstarted profiler is stopped

    def fit_start(self, state: State, logger: Logger) -> None:
        """Record that training has started, so that `close` can detect a failure."""
        self._is_training = True

    def fit_end(self, state: State, logger: Logger) -> None:
        """Record that training has finished."""
        self._is_training = False

    def batch_start(self, state: State, logger: Logger) -> None:
        """Step again if the profiler does not follow the schedule: after a save, or in a new epoch."""
        assert self.profiler is not None
        if self.profiler.current_action is not _ACTIONS[state.profiler.action]:
            self._step()
        self._has_recorded = self._has_recorded or self.profiler.current_action in _RECORDING
        logger.log_traces({"profiler/state": self.profiler.current_action.name})

    def batch_end(self, state: State, logger: Logger) -> None:
        """Step to the next batch, which saves the record if a cycle ends."""
        assert self.profiler is not None
        self._note_rank()
        self._step()

    def close(self, state: State, logger: Logger) -> None:
        """Stop torch's profiler, and log the operators of the last cycle by time and by memory."""
        if self.profiler is None:
            return
        profiler = self.profiler
        self._end(state)
        if not self.saved_traces:
            return
        # Available only once the profiler has stopped.
        averages = profiler.key_averages()
        orders = ["self_cpu_time_total"] + (["self_cuda_time_total"] if torch.cuda.is_available() else [])
        orders += ["self_cpu_memory_usage"] if self.profile_memory else []
        for order in orders:
            _log.info("By %s:\n%s", order, averages.table(sort_by=order, row_limit=_NUM_ROWS))

    def _end(self, state: State) -> None:
        """Stop torch's profiler, and save its record if training failed in the first cycle."""
        profiler = self.profiler
        is_first = self._is_training and not self._has_saved
        self._is_training = False
        if is_first and self._has_recorded and profiler.current_action in _RECORDING:
            self._note_rank()
        else:
            profiler.on_trace_ready = None  # do not save an unfinished cycle
            handlers: Sequence[object] = getattr(state.profiler, "trace_handlers", ())
            if is_first and not any(isinstance(handler, JSONTraceHandler) for handler in handlers):
                warn_of_no_trace(self._folder(state), state)
        try:
            profiler.__exit__(None, None, None)
        finally:
            self.profiler = None

    def _note_rank(self) -> None:
        # The trace merger identifies the rank of torch's events by this entry.
        if self.profiler.current_action in _RECORDING:
            self.profiler.add_metadata_json("global_rank", json.dumps(dist.get_global_rank()))

    def _step(self) -> None:
        with warnings.catch_warnings():  # the events are cleared, but each cycle is saved before
            warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
            self.profiler.step()

    def _save(self, state: State, logger: Logger) -> None:
        path = open_name(self._folder(state), self._name(self.filename, state))
        self.profiler.export_chrome_trace(os.fspath(path))
        # Handlers read the file now, since `prune` below may delete it.
        state.profiler.record_chrome_json_trace_file(os.fspath(path))
        if self.remote_file_name is not None:
            logger.upload_file(self._name(self.remote_file_name, state), path, overwrite=self.overwrite)
        if self.memory_filename is not None:
            page = open_name(self._folder(state), self._name(self.memory_filename, state))
            export_memory_timeline_html(self.profiler, os.fspath(page), state.device.torch_device)
            if self.memory_remote_file_name is not None:
                logger.upload_file(self._name(self.memory_remote_file_name, state), page, overwrite=self.overwrite)
        self.saved_traces.append(os.fspath(path))
        self._has_saved = True
        prune(self.saved_traces, self.num_traces_to_keep)

    def _folder(self, state: State) -> Path:
        return Path(format_name_with_dist(self.folder, state.run_name))

    def _name(self, name: str, state: State) -> str:
        return format_name_with_dist_and_time(name, state.run_name, state.timestamp)


def _ending(name: str, ending: str) -> str:
    return name if name.endswith(ending) else f"{name}{ending}"
