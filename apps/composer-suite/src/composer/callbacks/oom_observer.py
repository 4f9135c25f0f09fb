"""What was in memory when it ran out."""

from __future__ import annotations

import logging
import pickle
import weakref
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

# Of this module only what turns a snapshot into lines is used; its pictures and pages need a network.
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
    """What the files are called.

    Attributes:
        snapshot_file: The record itself, for `python -m torch.cuda._memory_viz` and PyTorch's page.
        trace_plot_file: A page with each allocation as a box over time.
        segment_plot_file: A page with what is in each segment.
        segment_flamegraph_file: Which lines of code hold the bytes of each segment.
        memory_flamegraph_file: Which lines of code hold the bytes of all.
    """

    snapshot_file: str
    trace_plot_file: str
    segment_plot_file: str
    segment_flamegraph_file: str
    memory_flamegraph_file: str

    @classmethod
    def from_file_name(cls, filename: str) -> SnapshotFileNameConfig:
        """Return the names that begin alike.

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
        """Return all of them."""
        return list(astuple(self))


class OOMObserver(Callback):
    """Keep what was in memory when a CUDA device ran out of it, as files that need no network to be looked at.

    They are written before the error is raised, so that also a run that ends with it has them: the record itself and
    four pictures; see `SnapshotFileNameConfig`. On other devices it warns and does nothing. Each file is tried for
    itself, and what goes wrong is logged. The allocator's history is recorded from the start on, which makes each
    allocation a little slower.

    Args:
        max_entries: How many of the allocator's last actions are kept.
        folder: Where to, with the run's and the ranks' placeholders.
        filename: How the files' names begin, with placeholders for run, ranks and time.
        remote_file_name: The folder where loggers keep them, or an address to upload to. `None` uploads nothing.
        overwrite: Whether there may be files in the folder, and of these names in the store.

    Raises:
        TypeError: If an argument is of another kind.
        ValueError: If `max_entries` is less than 1.
        FileExistsError: At the start, if the folder has files.

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
        """Begin to record, where there is memory to watch."""
        self._enabled = has_cuda_memory(state, "oom observer")
        if not self._enabled:
            return
        self._files.prepare(state, logger)
        # PyTorch never lets go of an observer, so it must not hold the run.
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
        """Write and upload what is in memory now, unless the callback is closed."""
        if not self._enabled:
            return
        try:
            snapshot = take_snapshot()
        except Exception:  # the error to be seen is that memory ran out
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
