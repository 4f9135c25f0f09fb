"""Recording of every memory allocation of a few batches."""

from __future__ import annotations

import logging
import pickle
from typing import TYPE_CHECKING

from composer.callbacks._memory_pages import (
    MemoryFiles,
    has_cuda_memory,
    record_history,
    stop_history,
    take_snapshot,
    timeline_page,
)
from composer_events.arguments import check_counts, check_places, to_time
from composer_events.callback import Callback
from composer_events.formatting import OF_TIME, check_placeholders
from composer_time import Time, TimeUnit

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["MemorySnapshot"]

_log = logging.getLogger(__name__)


class MemorySnapshot(Callback):
    """Record the actions of the CUDA allocator over a few batches, and save them as files.

    `<filename>.html` can be opened in any browser, offline. `<filename>.pickle` is for
    `python -m torch.cuda._memory_viz` and PyTorch's page; open only files that you have made. On other devices it
    only warns. Errors in writing files are logged and do not end training.

    Args:
        skip_batches: Number of batches to skip first.
        interval: Time to record: batches, or a time.
        max_entries: Number of the last actions to keep.
        folder: Local folder, with the placeholders of run and ranks.
        filename: Name of the files without extension, with placeholders for run, ranks and time.
        remote_file_name: Folder of the files for loggers that keep files, or a URI to upload to. `None` uploads
            nothing.
        overwrite: Whether the folder may contain files, and the object store files of these names.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is negative.
        FileExistsError: At the start, if the folder contains files.

    Example:
        >>> snapshot = MemorySnapshot(skip_batches=2, interval='1ba')
    """

    def __init__(
        self,
        skip_batches: int = 1,
        interval: int | str | Time[int] = "3ba",
        max_entries: int = 100000,
        folder: str = "{run_name}/torch_traces",
        filename: str = "rank{rank}.{batch}.memory_snapshot",
        remote_file_name: str | None = "{run_name}/torch_memory_traces",
        overwrite: bool = False,
    ) -> None:
        check_counts(0, skip_batches=skip_batches)
        check_counts(max_entries=max_entries)
        self.interval = to_time("interval", interval, TimeUnit.BATCH)
        if int(self.interval) < 1:
            raise ValueError(f"interval={interval!r} must be how long to record, such as '3ba'.")
        check_places(filename=filename)
        check_placeholders(OF_TIME, filename=filename)
        self.skip_batches = skip_batches
        self.max_entries = max_entries
        self.filename = filename
        self.folder, self.remote_file_name, self.overwrite = folder, remote_file_name, overwrite
        self._files = MemoryFiles(folder, remote_file_name, overwrite)
        self._batches_left_to_skip = skip_batches
        self._end: Time[int] | None = None
        self._enabled = False

    def init(self, state: State, logger: Logger) -> None:
        """Create the folder, if the model is on a CUDA device."""
        self._enabled = has_cuda_memory(state, "memory snapshot")
        if self._enabled:
            self._files.prepare(state, logger)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Start recording after the skipped batches."""
        if not self._enabled or self._end is not None:
            return
        if self._batches_left_to_skip > 0:
            self._batches_left_to_skip -= 1
            return
        self._end = state.timestamp.get(self.interval.unit) + self.interval
        record_history(self.max_entries)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Save the record when the interval is over."""
        if self._enabled and self._end is not None and state.timestamp.get(self.interval.unit) >= self._end:
            self._export(state, logger)
            self._stop()

    def close(self, state: State, logger: Logger) -> None:
        """Stop recording."""
        if self._enabled and self._end is not None:
            self._stop()

    def _stop(self) -> None:
        self._enabled = False
        stop_history()

    def _export(self, state: State, logger: Logger) -> None:
        try:
            snapshot = take_snapshot()
        except Exception:  # a monitor must not end training
            _log.exception("No snapshot of the memory could be taken.")
            return
        if not any(snapshot["device_traces"]):
            _log.info("Nothing was allocated while memory was recorded, so no snapshot is kept.")
            return
        path = self._files.path(self.filename, state)
        files = {
            f"{path}.pickle": lambda: pickle.dumps(snapshot),
            f"{path}.html": lambda: timeline_page(snapshot).encode(),
        }
        self._files.keep(files, state, logger)
