"""Event files for TensorBoard."""

import os
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from composer.loggers._service_queue import PATIENCE_S, PixelsAndMasks, QueuedLogger, as_number, require
from composer_dist import get_global_rank
from composer_events.arguments import check_counts
from composer_events.hparams import convert_nested_dict_to_flat_dict
from composer_events.logger import Logger
from composer_events.logger_destination import format_log_data_value
from composer_events.state import State

__all__ = ["TensorboardLogger"]

_NEVER_S = 365 * 24 * 60 * 60  # a year, since the logger flushes the files itself


class TensorboardLogger(QueuedLogger):
    """Logger that writes event files for TensorBoard: `tensorboard --logdir tensorboard_logs`.

    They contain metrics, images and, at the end, hyperparameters with the final metrics for TensorBoard's HParams page.
    The files are written by a separate thread. If a logger uploads files, such as a `RemoteUploaderDownloader`,
    they are uploaded as `tensorboard_logs/{run_name}/<name of the file>-<rank>` at each flush.

    Args:
        log_dir: The folder with a subfolder for each run; `'tensorboard_logs'` by default.
        flush_interval: The number of batches between flushes. The end of an epoch or evaluation also flushes.
        rank_zero_only: Whether only rank 0 writes.
        patience_s: Seconds that the end of the run waits for the disk.

    Attributes:
        run_name: The name of the run, set at INIT.

    Raises:
        MissingConditionalImportError: If tensorboard is not installed; the extra `tensorboard` brings it.
        ValueError: If `flush_interval` is less than 1.

    Example:
        >>> from composer.loggers import TensorboardLogger
        >>> TensorboardLogger(log_dir="runs", flush_interval=10).log_dir
        'runs'
    """

    def __init__(
        self,
        log_dir: str | None = None,
        flush_interval: int = 100,
        rank_zero_only: bool = True,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        require("tensorboard", extra="tensorboard")
        check_counts(flush_interval=flush_interval)
        super().__init__(rank_zero_only, patience_s)
        self.log_dir = "tensorboard_logs" if log_dir is None else str(log_dir)
        self.flush_interval, self.rank_zero_only = flush_interval, rank_zero_only
        self.run_name: str | None = None
        self._writer: Any = None  # this and `_latest` belong to the outbox's thread
        self._hparams: dict[str, Any] = {}
        self._latest: dict[str, float] = {}
        self._written: SimpleQueue[Path] = SimpleQueue()  # closed by the thread, not uploaded yet
        self._ended: set[Path] = set()

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Store hyperparameters, which are written at the end of the run."""
        flat = convert_nested_dict_to_flat_dict(hyperparameters)
        self._hparams.update({name: _typed(value) for name, value in flat.items()})

    def init(self, state: State, logger: Logger) -> None:
        """Open a file for the run."""
        self.run_name = state.run_name
        if self._enabled:
            self._outbox.open(lambda: self._begin(state.run_name))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Flush at the interval, and upload finished files."""
        if state.timestamp.num_batches % self.flush_interval == 0:
            self._flush(logger)
        self._upload(logger)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Flush the file."""
        self._flush(logger)

    eval_end = epoch_end

    def fit_end(self, state: State, logger: Logger) -> None:
        """Flush, wait until everything is written, and upload it."""
        self._flush(logger)
        self._outbox.drain()
        self._upload(logger)

    def close(self, state: State, logger: Logger) -> None:
        """Write hyperparameters with the final metrics, wait until everything is written, and upload it."""
        if self._enabled:
            self._outbox.post(self._write_hparams, is_kept=True)
            self._flush(logger)
            self._outbox.drain()
            self._upload(logger)

    def post_close(self) -> None:
        """Close the file."""
        self._outbox.close(self._end)

    def _flush(self, logger: Logger) -> None:
        if self._enabled:
            # With uploads, each flush ends a file, since otherwise every upload would repeat all earlier events.
            is_uploaded = logger.takes("upload_file")
            self._outbox.post(lambda: self._end() if is_uploaded else self._writer.flush(), is_kept=True)

    def _upload(self, logger: Logger) -> None:
        """Upload closed files. In the main thread, since other loggers need not be thread-safe."""
        while True:
            try:
                path = self._written.get_nowait()
            except Empty:
                return
            name = f"tensorboard_logs/{self.run_name}/{path.name}-{get_global_rank()}"
            logger.upload_file(name, path, overwrite=True)

    def _begin(self, run_name: str) -> bool:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to import

        self._latest, self._ended = {}, set()
        self._writer = SummaryWriter(os.path.join(self.log_dir, run_name), flush_secs=_NEVER_S)
        return True

    def _send_metrics(self, values: dict[str, Any], step: int | None) -> None:
        for name, value in values.items():
            if (number := as_number(value)) is not None:  # TensorBoard's scalars cannot be text
                self._writer.add_scalar(name, number, step)
                if "metric" in name or "loss" in name:  # results, not times or learning rates, for the HParams page
                    self._latest[name] = number

    def _send_images(
        self, images: PixelsAndMasks, name: str, step: int | None, labels: dict[int, str] | None, use_table: bool
    ) -> None:
        pixels = [image for image, _ in images]
        if len({image.shape for image in pixels}) == 1:  # side by side
            self._writer.add_images(name, np.stack(pixels), step, dataformats="NHWC")
            return
        for index, image in enumerate(pixels):
            self._writer.add_image(f"{name}/{index}", image, step, dataformats="HWC")

    def _write_hparams(self) -> None:
        metrics = {f"hparams/{name}": value for name, value in self._latest.items()}
        # The run name "." adds them to this run; any other name would create a nested run.
        self._writer.add_hparams(self._hparams, metrics, run_name=".")

    def _end(self) -> None:
        """Close the file. The next value opens another one."""
        folder = Path(self._writer.log_dir)
        self._writer.close()
        # Other processes may write to the same folder. File names contain the id of the process.
        for path in sorted(folder.glob(f"events.out.tfevents.*.{os.getpid()}.*")):
            if path not in self._ended:
                self._ended.add(path)
                self._written.put(path)


def _typed(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else format_log_data_value(value)
