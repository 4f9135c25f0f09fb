"""Record of the memory in use when an out-of-memory error occurs."""

from __future__ import annotations

import logging
import pickle
import weakref
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

# Only its text output is used; its pages load scripts from the network.
from torch.cuda import _memory_viz

from composer.callbacks._memory_pages import (
    MemoryFiles,
    attach_out_of_memory_observer,
    draw_flamegraph,
    has_cuda_memory,
    record_history,
    segment_page,
    stop_history,
    take_snapshot,
    timeline_page,
)
from composer_events.arguments import check_counts, check_places
from composer_events.callback import Callback
from composer_events.formatting import OF_TIME, check_placeholders

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["OOMObserver", "SnapshotFileNameConfig"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotFileNameConfig:
    """Names of the files.

    Attributes:
        snapshot_file: The snapshot, for `python -m torch.cuda._memory_viz` and PyTorch's page.
        trace_plot_file: A page with each allocation as a box over time.
        segment_plot_file: A page with the blocks of each segment.
        segment_flamegraph_file: A flame graph of the code that holds the bytes of each segment.
        memory_flamegraph_file: A flame graph of the code that holds all bytes.
    """

    snapshot_file: str
    trace_plot_file: str
    segment_plot_file: str
    segment_flamegraph_file: str
    memory_flamegraph_file: str

    @classmethod
    def from_file_name(cls, filename: str) -> SnapshotFileNameConfig:
        """Return names with a common prefix.

        Example:
            >>> SnapshotFileNameConfig.from_file_name('rank0_oom').snapshot_file
            'rank0_oom_snapshot.pickle'
        """
        return cls(
            snapshot_file=f"{filename}_snapshot.pickle",
            trace_plot_file=f"{filename}_trace_plot.html",
            segment_plot_file=f"{filename}_segment_plot.html",
            segment_flamegraph_file=f"{filename}_segment_flamegraph.svg",
            memory_flamegraph_file=f"{filename}_memory_flamegraph.svg",
        )

    def list_filenames(self) -> list[str]:
        """Return all names."""
        return list(astuple(self))


class OOMObserver(Callback):
    """Save the memory in use when a CUDA device runs out of it, as files that can be opened offline.

    They are written before the error is raised, so they exist even if it ends the run: the snapshot and four plots; see
    `SnapshotFileNameConfig`. On other devices it only warns. Files are written independently of each other, and errors
    are logged. The allocator's history is recorded from the start, which makes each allocation slightly slower.

    Args:
        max_entries: Number of the allocator's last actions to keep.
        folder: Local folder, with the placeholders of run and ranks.
        filename: Prefix of the files' names, with placeholders for run, ranks and time.
        remote_file_name: Folder of the files for loggers that keep files, or a URI to upload to. `None` uploads
            nothing.
        overwrite: Whether the folder may contain files, and the object store files of these names.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `max_entries` is less than 1.
        FileExistsError: At the start, if the folder contains files.

    Example:
        >>> observer = OOMObserver(folder='traces/{run_name}', remote_file_name=None)
    """

    def __init__(
        self,
        max_entries: int = 100000,
        folder: str = "{run_name}/torch_traces",
        filename: str = "rank{rank}_oom",
        remote_file_name: str | None = "{run_name}/oom_traces/rank{rank}_oom",
        overwrite: bool = False,
    ) -> None:
        check_counts(max_entries=max_entries)
        check_places(filename=filename)
        check_placeholders(OF_TIME, filename=filename)
        self.max_entries = max_entries
        self.filename = filename
        self.folder, self.remote_file_name, self.overwrite = folder, remote_file_name, overwrite
        self._files = MemoryFiles(folder, remote_file_name, overwrite)
        self._enabled = False

    def init(self, state: State, logger: Logger) -> None:
        """Start recording, if the model is on a CUDA device."""
        self._enabled = has_cuda_memory(state, "oom observer")
        if not self._enabled:
            return
        self._files.prepare(state, logger)
        # PyTorch holds an observer until the process ends, so it must not keep the run alive.
        observer, of_state, of_logger = weakref.ref(self), weakref.ref(state), weakref.ref(logger)

        def observe(device: int, asked_for: int, total: int, free: int) -> None:
            alive, its_state, its_logger = observer(), of_state(), of_logger()
            if alive is not None and its_state is not None and its_logger is not None:
                alive.keep_snapshot(its_state, its_logger)

        attach_out_of_memory_observer(observe)
        record_history(self.max_entries)

    def close(self, state: State, logger: Logger) -> None:
        """Stop recording."""
        if self._enabled:
            self._enabled = False
            stop_history()

    def keep_snapshot(self, state: State, logger: Logger) -> None:
        """Write and upload the current memory usage, unless the callback is closed."""
        if not self._enabled:
            return
        try:
            snapshot = take_snapshot()
        except Exception:  # the user must see the out-of-memory error, not this one
            _log.exception("No snapshot of the memory could be taken.")
            return
        names = SnapshotFileNameConfig.from_file_name(self._files.path(self.filename, state))
        files = {
            names.snapshot_file: lambda: pickle.dumps(snapshot),
            names.trace_plot_file: lambda: timeline_page(snapshot).encode(),
            names.segment_plot_file: lambda: segment_page(snapshot).encode(),
            names.segment_flamegraph_file: lambda: _memory_viz.segments(snapshot, draw_flamegraph).encode(),
            names.memory_flamegraph_file: lambda: _memory_viz.memory(snapshot, draw_flamegraph).encode(),
        }
        self._files.keep(files, state, logger)
