"""Recording of the memory in use at an out-of-memory error."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import torch

# Only for its text output, since its pages load scripts from the network.
from torch.cuda import _memory_viz

from composer.callbacks._memory_pages import MemoryRecorder, Snapshot, draw_flamegraph, segment_page, timeline_page

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["OOMObserver", "SnapshotFileNameConfig"]


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


class OOMObserver(MemoryRecorder):
    """Save the memory in use when a CUDA device runs out of memory, as files that can be opened offline.

    The snapshot and four plots, see `SnapshotFileNameConfig`, are written before the error is raised, so they exist
    even if it ends the run. Files are written independently of each other, and errors are logged. On other devices, the
    callback only warns. The allocator's history is recorded from the start, which slightly slows down each allocation.

    Args:
        max_entries: Number of the allocator's last actions to keep.
        folder: Local folder, with the placeholders of run and ranks.
        filename: Prefix of the files' names, with placeholders for run, ranks and time.
        remote_file_name: Folder of the files for loggers that keep files, or a URI to upload to. `None` uploads
            nothing.
        overwrite: Whether the folder may contain files, and the object store may contain files of these names.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `max_entries` is less than 1.
        FileExistsError: At the start, if the folder contains files.

    Example:
        >>> observer = OOMObserver(folder='traces/{run_name}', remote_file_name=None)
    """

    _title = "oom observer"

    def __init__(
        self,
        max_entries: int = 100000,
        folder: str = "{run_name}/torch_traces",
        filename: str = "rank{rank}_oom",
        remote_file_name: str | None = "{run_name}/oom_traces/rank{rank}_oom",
        overwrite: bool = False,
    ) -> None:
        super().__init__(max_entries, folder, filename, remote_file_name, overwrite)

    def init(self, state: State, logger: Logger) -> None:
        """Start recording, if the model is on a CUDA device."""
        super().init(state, logger)
        if not self._enabled:
            return
        # PyTorch keeps the observer until the process ends, so it must not keep the run alive.
        observer, of_state, of_logger = weakref.ref(self), weakref.ref(state), weakref.ref(logger)

        def observe(device: int, asked_for: int, total: int, free: int) -> None:
            alive, its_state, its_logger = observer(), of_state(), of_logger()
            if alive is not None and its_state is not None and its_logger is not None:
                alive.keep_snapshot(its_state, its_logger)

        torch._C._cuda_attach_out_of_memory_observer(observe)  # pyright: ignore[reportAttributeAccessIssue]  # not in its stubs
        self._record()

    def close(self, state: State, logger: Logger) -> None:
        """Stop recording."""
        if self._enabled:
            self._stop()

    def keep_snapshot(self, state: State, logger: Logger) -> None:
        """Write and upload the current memory usage, unless the callback is closed."""
        if self._enabled:
            self._save(state, logger, _files)


def _files(path: str, snapshot: Snapshot) -> dict[str, Callable[[], bytes]]:
    names = SnapshotFileNameConfig.from_file_name(path)
    return {
        names.snapshot_file: lambda: pickle.dumps(snapshot),
        names.trace_plot_file: lambda: timeline_page(snapshot).encode(),
        names.segment_plot_file: lambda: segment_page(snapshot).encode(),
        names.segment_flamegraph_file: lambda: _memory_viz.segments(snapshot, draw_flamegraph).encode(),
        names.memory_flamegraph_file: lambda: _memory_viz.memory(snapshot, draw_flamegraph).encode(),
    }
