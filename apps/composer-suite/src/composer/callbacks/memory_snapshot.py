"""Recording of every memory allocation of a few batches."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING

from composer.callbacks._memory_pages import MemoryRecorder, Snapshot, timeline_page
from composer_events.arguments import check_counts, to_time
from composer_time import Time, TimeUnit

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["MemorySnapshot"]

_log = logging.getLogger(__name__)


class MemorySnapshot(MemoryRecorder):
    """Record the actions of the CUDA allocator over a few batches, and save them as files.

    `<filename>.html` can be opened in any browser, offline. `<filename>.pickle` is for
    `python -m torch.cuda._memory_viz` and PyTorch's page; only open files from a trusted source. On other devices, the
    callback only warns. Errors in writing files are logged and do not end training.

    Args:
        skip_batches: Number of batches to skip first.
        interval: Duration of the recording: batches, or a time.
        max_entries: Number of the last actions to keep.
        folder: Local folder, with the placeholders of run and ranks.
        filename: Name of the files without extension, with placeholders for run, ranks and time.
        remote_file_name: Folder of the files for loggers that keep files, or a URI to upload to. `None` uploads
            nothing.
        overwrite: Whether the folder may contain files, and the object store may contain files of these names.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is negative.
        FileExistsError: At the start, if the folder contains files.

    Example:
        >>> snapshot = MemorySnapshot(skip_batches=2, interval='1ba')
    """

    _title = "memory snapshot"

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
        super().__init__(max_entries, folder, filename, remote_file_name, overwrite)
        check_counts(0, skip_batches=skip_batches)
        self.skip_batches = skip_batches
        self.interval = to_time("interval", interval, TimeUnit.BATCH)
        if int(self.interval) < 1:
            raise ValueError(f"interval={interval!r} must be how long to record, such as '3ba'.")
        self._batches_left_to_skip = skip_batches
        self._end: Time[int] | None = None

    def batch_start(self, state: State, logger: Logger) -> None:
        """Start recording after the skipped batches."""
        if not self._enabled or self._end is not None:
            return
        if self._batches_left_to_skip > 0:
            self._batches_left_to_skip -= 1
            return
        self._end = state.timestamp.get(self.interval.unit) + self.interval
        self._record()  # only now, since recording slows down each allocation

    def batch_end(self, state: State, logger: Logger) -> None:
        """Save the record when the interval is over."""
        if self._enabled and self._end is not None and state.timestamp.get(self.interval.unit) >= self._end:
            self._save(state, logger, _files)
            self._stop()

    def close(self, state: State, logger: Logger) -> None:
        """Stop recording."""
        if self._enabled and self._end is not None:
            self._stop()


def _files(path: str, snapshot: Snapshot) -> dict[str, Callable[[], bytes]]:
    if not any(snapshot["device_traces"]):
        _log.info("Nothing was allocated while memory was recorded, so no snapshot is kept.")
        return {}
    return {
        f"{path}.pickle": lambda: pickle.dumps(snapshot),
        f"{path}.html": lambda: timeline_page(snapshot).encode(),
    }
