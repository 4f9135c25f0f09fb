"""Integration of PyTorch's profiler: operators on CPU and accelerator, and a page with the memory over time."""

from __future__ import annotations

import base64
import html
import io
import json
import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerAction as TorchAction

from composer.profiler.json_trace_handler import prepare_folder, prune
from composer.profiler.trace_handler import profiler_of
from composer_dist import dist
from composer_events.arguments import check_counts, check_flags
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

__all__ = ["TorchProfiler", "export_memory_timeline_html"]

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
    are then saved.

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
        check_placeholders(folder=folder)
        check_placeholders(
            OF_TIME,
            filename=filename,
            remote_file_name=remote_file_name,
            memory_filename=memory_filename,
            memory_remote_file_name=memory_remote_file_name,
        )
        check_flags(overwrite=overwrite)
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
        self._is_training = self._has_saved = False

    def init(self, state: State, logger: Logger) -> None:
        """Start torch's profiler. Every rank must call this."""
        own = profiler_of(state, self)
        prepare_folder(self._folder(state), overwrite=self.overwrite)

        def follow(step: int) -> TorchAction:
            del step  # counts the steps of torch's profiler; the schedule uses the batch of the epoch
            # The trace handlers write the saved trace next. Recording this work with stacks would make the next trace
            # many times larger, so recording resumes at the next batch.
            if self.profiler is not None and self.profiler.current_action is TorchAction.RECORD_AND_SAVE:
                return TorchAction.NONE
            return _ACTIONS[own.action]

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
        profiler, is_failed = self.profiler, self._is_training
        self._is_training = False
        if is_failed and not self._has_saved and profiler.current_action in _RECORDING:
            self._note_rank()
        else:
            profiler.on_trace_ready = None  # do not save an unfinished cycle
        try:
            profiler.__exit__(None, None, None)
        finally:
            self.profiler = None
        if not self.saved_traces:
            return
        # Available only once the profiler has stopped.
        averages = profiler.key_averages()
        orders = ["self_cpu_time_total"] + (["self_cuda_time_total"] if torch.cuda.is_available() else [])
        orders += ["self_cpu_memory_usage"] if self.profile_memory else []
        for order in orders:
            _log.info("By %s:\n%s", order, averages.table(sort_by=order, row_limit=_NUM_ROWS))

    def _note_rank(self) -> None:
        # The trace merger identifies the rank of torch's events by this entry.
        if self.profiler.current_action in _RECORDING:
            self.profiler.add_metadata_json("global_rank", json.dumps(dist.get_global_rank()))

    def _step(self) -> None:
        with warnings.catch_warnings():  # the events are cleared, but each cycle is saved before
            warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
            self.profiler.step()

    def _save(self, state: State, logger: Logger) -> None:
        path = self._path(self.filename, state)
        self.profiler.export_chrome_trace(os.fspath(path))
        # Handlers read the file now, since `prune` below may delete it.
        state.profiler.record_chrome_json_trace_file(os.fspath(path))
        if self.remote_file_name is not None:
            logger.upload_file(self._name(self.remote_file_name, state), path, overwrite=self.overwrite)
        if self.memory_filename is not None:
            page = self._path(self.memory_filename, state)
            export_memory_timeline_html(self.profiler, os.fspath(page), state.device.torch_device)
            if self.memory_remote_file_name is not None:
                logger.upload_file(self._name(self.memory_remote_file_name, state), page, overwrite=self.overwrite)
        self.saved_traces.append(os.fspath(path))
        self._has_saved = True
        prune(self.saved_traces, self.num_traces_to_keep)

    def _folder(self, state: State) -> Path:
        return Path(format_name_with_dist(self.folder, state.run_name))

    def _path(self, name: str, state: State) -> Path:
        path = self._folder(state) / self._name(name, state)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _name(self, name: str, state: State) -> str:
        return format_name_with_dist_and_time(name, state.run_name, state.timestamp)


def _ending(name: str, ending: str) -> str:
    return name if name.endswith(ending) else f"{name}{ending}"


def export_memory_timeline_html(
    prof: Any,
    path: str | os.PathLike[str],
    device: str | torch.device | None = None,
    figsize: tuple[float, float] = (20, 12),
    title: str | None = None,
    yxis_step_size: float = 1.0,
    return_fig: bool = False,
) -> Any:
    """Write a page with the memory usage over time by category: weights, gradients, activations and more.

    Args:
        prof: A `torch.profiler.profile` that has recorded shapes, memory and stacks.
        path: Path of the page.
        device: Device whose memory is shown. Default: the accelerator, or the host without one.
        figsize: Width and height in inches.
        title: Title above the plot.
        yxis_step_size: Distance of the ticks of the memory axis, in GiB.
        return_fig: Whether to return the figure.

    Returns:
        The `matplotlib.figure.Figure` with `return_fig`, else `None`.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If the profiler has no record of the device's memory.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("The memory timeline needs matplotlib: pip install matplotlib") from error
    # torch has no public API for the memory categories, and its own page calls CUDA even without a CUDA device.
    from torch.profiler import _memory_profiler as categories

    timeline = categories.MemoryProfileTimeline(prof._memory_profile())
    times_us, sizes = timeline._coalesce_timeline(str(_device(device)))
    if not times_us:
        raise ValueError(f"The profiler has recorded no memory of {_device(device)}. Pass the model's device.")
    since_ms = [(time - times_us[0]) / 1e3 for time in times_us]
    stacked = torch.tensor(sizes, dtype=torch.float64).cumsum(dim=1) / 1024**3
    # Not through pyplot, which would keep the figure in memory.
    figure = Figure(figsize=figsize, dpi=80)
    axes = figure.gca()
    colors = categories._CATEGORY_TO_COLORS
    for category, color in colors.items():
        index = categories._CATEGORY_TO_INDEX[category]
        axes.fill_between(since_ms, stacked[:, index], stacked[:, index + 1], color=color, alpha=0.7)
    figure.legend(["Unknown" if category is None else category.name for category in colors])
    axes.set_xlabel("Time (ms)")
    axes.set_ylabel("Memory (GiB)")
    top = float(stacked.max())
    if top > yxis_step_size:
        axes.set_yticks([step * yxis_step_size for step in range(int(top / yxis_step_size) + 2)])
    axes.set_title("\n".join([title] if title else []) + f"\nPeak of what the profiler saw: {top:.3f} GiB")
    _write_page(figure, path, title or "Memory over time")
    return figure if return_fig else None


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    device = torch.device(device)
    # torch's timeline has an index in each device's name, except for the CPU.
    return torch.device(device.type, 0) if device.type != "cpu" and device.index is None else device


def _write_page(figure: Any, path: str | os.PathLike[str], title: str) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    encoded = base64.b64encode(picture.getvalue()).decode()
    # The image is embedded, so that the page is a single file.
    with open(path, "w", encoding="utf-8") as file:
        file.write(
            f'<!doctype html><html><head><meta charset="utf-8"><title>{html.escape(title)}</title></head>'
            f'<body><img alt="memory by category over time" src="data:image/png;base64,{encoded}"></body></html>\n'
        )
