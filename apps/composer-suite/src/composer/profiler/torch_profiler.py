"""PyTorch's own profiler, which sees the operators, on the processor and on the accelerator."""

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
_NUM_ROWS = 20
_ACTIONS = {
    ProfilerAction.SKIP: TorchAction.NONE,
    ProfilerAction.WARMUP: TorchAction.WARMUP,
    ProfilerAction.ACTIVE: TorchAction.RECORD,
    ProfilerAction.ACTIVE_AND_SAVE: TorchAction.RECORD_AND_SAVE,
}
_RECORDING = (TorchAction.RECORD, TorchAction.RECORD_AND_SAVE)


class TorchProfiler(Callback):
    """Runs `torch.profiler` as the `Profiler`'s schedule says, and adds what it sees to the trace.

    A cycle that is not finished leaves nothing. Only if an exception ends training in the first one, what was recorded
    until then is saved. Where there is nothing, a line in the log says why; of several who would write it, one does.

    Args:
        folder: Where torch's own files go, with the placeholders of `format_name_with_dist`.
        filename: What each is called there, also with those of the time.
        remote_file_name: Its name where a logger keeps files; `None` keeps it here only.
        memory_filename: What a page is called that shows what the memory was used for over time; it must end in
            `.html`, and needs `record_shapes`, `profile_memory`, `with_stack` and the package matplotlib. `None` for
            none.
        memory_remote_file_name: Its name where a logger keeps files.
        overwrite: Whether the folder may hold files of an earlier run.
        use_gzip: Whether to compress the files, whose names then end in `.gz`.
        record_shapes: Record the shapes of operators' inputs.
        profile_memory: Record what is allocated and freed.
        with_stack: Record from which line of Python an operator was called.
        with_flops: Estimate the floating-point operations of matrix products and convolutions.
        num_traces_to_keep: How many of the latest files stay on the disk; -1 for all.

    Attributes:
        saved_traces: The files, oldest first.

    Raises:
        FileExistsError: If the folder is not empty, when training begins.
        RuntimeError: If there is no profiler whose schedule it could follow.
        TypeError: If an argument is of another kind.
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
        """Begin. Every rank must call this."""
        if state.profiler is None:
            raise RuntimeError(
                "A TorchProfiler follows the schedule of a profiler, and there is none. Give it a schedule: "
                "Trainer(profiler=Profiler(schedule, trace_handlers)), which makes a TorchProfiler itself."
            )
        prepare_folder(self._folder(state), overwrite=self.overwrite)

        def follow(step: int) -> TorchAction:
            del step  # it counts what torch has seen; the schedule knows the batch of the epoch
            # The trace handlers write the saved trace next. Recorded with stacks, their own work would make the next
            # trace many times as large, so recording resumes at the next batch.
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
        profiler.__enter__()
        self.profiler = profiler  # one that failed to begin cannot be ended: torch 2.11 crashes

    def fit_start(self, state: State, logger: Logger) -> None:
        """Note that training begins, which says at the end whether it was cut off."""
        self._is_training = True

    def fit_end(self, state: State, logger: Logger) -> None:
        """Note that training was not cut off."""
        self._is_training = False

    def batch_start(self, state: State, logger: Logger) -> None:
        """Follow the schedule where the last batch's step could not: after a save, and in a new epoch."""
        assert self.profiler is not None
        if self.profiler.current_action is not _ACTIONS[state.profiler.action]:
            self._step()
        self._has_recorded = self._has_recorded or self.profiler.current_action in _RECORDING
        logger.log_traces({"profiler/state": self.profiler.current_action.name})

    def batch_end(self, state: State, logger: Logger) -> None:
        """Go on to the next batch; what was recorded is saved if a cycle ends."""
        assert self.profiler is not None
        self._note_rank()
        self._step()

    def close(self, state: State, logger: Logger) -> None:
        """End, and write to the log which operators of the last cycle took longest and which most memory."""
        if self.profiler is None:
            return
        profiler = self.profiler
        self._end(state)
        if not self.saved_traces:
            return
        averages = profiler.key_averages()
        orders = ["self_cpu_time_total"] + (["self_cuda_time_total"] if torch.cuda.is_available() else [])
        orders += ["self_cpu_memory_usage"] if self.profile_memory else []
        for order in orders:
            _log.info("By %s:\n%s", order, averages.table(sort_by=order, row_limit=_NUM_ROWS))

    def _end(self, state: State) -> None:
        """End torch's profiler, which saves what it has recorded if that is the first cycle and training failed."""
        profiler = self.profiler
        is_first = self._is_training and not self._has_saved
        self._is_training = False
        if is_first and self._has_recorded and profiler.current_action in _RECORDING:
            self._note_rank()
        else:
            profiler.on_trace_ready = None  # a cycle that was not finished is not one
            handlers: Sequence[object] = getattr(state.profiler, "trace_handlers", ())
            if is_first and not any(isinstance(handler, JSONTraceHandler) for handler in handlers):
                warn_of_no_trace(self._folder(state), state)
        try:
            profiler.__exit__(None, None, None)
        finally:
            self.profiler = None

    def _note_rank(self) -> None:
        if self.profiler.current_action in _RECORDING:
            self.profiler.add_metadata_json("global_rank", json.dumps(dist.get_global_rank()))

    def _step(self) -> None:
        with warnings.catch_warnings():  # that a cycle's events go when they are saved is what is wanted
            warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
            self.profiler.step()

    def _save(self, state: State, logger: Logger) -> None:
        path = open_name(self._folder(state), self._name(self.filename, state))
        self.profiler.export_chrome_trace(os.fspath(path))
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
