"""Metrics as lines of text, for runs whose output is redirected to a file."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TextIO

from composer.loggers._text_output import TextLogger, table_as_json, table_as_text
from composer.utils.notebook import is_notebook
from composer_events.arguments import to_time
from composer_events.logger import Logger
from composer_events.logger_destination import LoggedMetrics, format_log_data_value
from composer_events.state import State
from composer_time import Time, TimeUnit

__all__ = ["NUM_EVAL_LOGGING_EVENTS", "ConsoleLogger"]

_BATCH: Final = TimeUnit.BATCH  # looking up an enum member is slow in Python 3.11, and this is needed in each batch

NUM_EVAL_LOGGING_EVENTS = 11
"""Maximum number of progress lines in one evaluation."""


class ConsoleLogger(TextLogger):
    """Logger that writes training metrics at intervals, and evaluation metrics after each evaluation, as text.

    Each block contains the latest values logged since the previous one. Tables have aligned columns on a terminal and
    in a notebook; in a file or a pipe, each is a line of JSON. Every rank writes metrics, and local rank 0 also writes
    the settings of the run.

    Args:
        log_interval: The interval in epochs (`'1ep'`, or a bare number) or batches (`'10ba'`). A block is also written
            after the first batch or epoch and at the end.
        stream: `'stderr'`, `'stdout'` or a text stream.
        log_traces: Whether to also write the actions of algorithms.

    Attributes:
        tables: The logged tables, as JSON.

    Raises:
        ValueError: If the interval is in another unit, or the stream is another string.

    Example:
        >>> from types import SimpleNamespace
        >>> console = ConsoleLogger(stream="stdout")
        >>> state = SimpleNamespace(max_duration=None)
        >>> console.log_to_console({"loss": 0.51234}, state, prefix="Train ")  # doctest: +NORMALIZE_WHITESPACE
        Train loss: 0.5123
    """

    def __init__(
        self, log_interval: int | str | Time[int] = "1ba", stream: str | TextIO = "stderr", log_traces: bool = False
    ) -> None:
        super().__init__(stream, log_traces)
        self.log_interval: Time[Any] = to_time("console_log_interval", log_interval, TimeUnit.EPOCH)
        if self.log_interval.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH):
            raise ValueError(
                f"The `console_log_interval` argument must have units of EPOCH or BATCH. {log_interval!r} has "
                f"{self.log_interval.unit.name}. Give epochs ('1ep') or batches ('10ba')."
            )
        if self.log_interval.value < 1:
            raise ValueError(f"console_log_interval={log_interval!r} must be 1 or more.")
        self._logged: dict[str, Any] = {}
        self.tables: dict[str, str] = {}
        self._tables_as_text: dict[str, str] = {}
        self.eval_batch_idxs_to_log: list[int] = []
        self._last_batch: int | None = None  # of the latest block of training

    def take_metrics(self, logged: Sequence[LoggedMetrics]) -> None:
        """Store metrics for the next block."""
        for metrics, _, _, _ in logged:
            self._logged.update(metrics)

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """The values of the next block."""
        self.catch_up()
        return self._logged

    @logged_metrics.setter
    def logged_metrics(self, metrics: dict[str, Any]) -> None:
        self.catch_up()
        self._logged = metrics

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Store a table, which is written with every later block."""
        self.tables[name] = table_as_json(columns, rows)
        self._tables_as_text[name] = table_as_text(columns, rows, indent="\t   ")

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write a block at the interval, if it counts batches."""
        interval = self.log_interval
        if interval.unit is not _BATCH:
            return
        if state.timestamp.num_batches % interval.value == 0 or self._last_batch is None:
            self._show_training(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Write a block at the interval, if it counts epochs."""
        unit, every = self.log_interval.unit, self.log_interval.value
        if unit is TimeUnit.EPOCH and (state.timestamp.num_epochs % every == 0 or self._last_batch is None):
            self._show_training(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write the remaining values."""
        if self._last_batch != state.timestamp.num_batches:
            self._show_training(state)
        self.logged_metrics.clear()

    def eval_start(self, state: State, logger: Logger) -> None:
        """Choose the batches after which to write the progress."""
        self._show_hparams()
        self.logged_metrics.clear()  # values of training must not appear among those of the evaluation
        length = 0 if state.dataloader_len is None else int(state.dataloader_len)
        if length < NUM_EVAL_LOGGING_EVENTS:
            chosen = range(1, length)
        else:
            steps = NUM_EVAL_LOGGING_EVENTS - 1
            chosen = (round(1 + (length - 1) * step / steps) for step in range(steps))
        self.eval_batch_idxs_to_log = list(chosen)  # not the last batch, which is followed by the metrics

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Write the progress of the evaluation."""
        if state.eval_timestamp.num_batches in self.eval_batch_idxs_to_log:
            self._write(_progress_of_evaluation(state))

    def eval_end(self, state: State, logger: Logger) -> None:
        """Write the results of the evaluation."""
        self.log_to_console(self.logged_metrics, state, prefix="Eval ", is_train=False)
        self.logged_metrics.clear()

    def log_to_console(self, data: Mapping[str, Any], state: State, prefix: str = "", is_train: bool = True) -> None:
        """Write one block.

        Args:
            data: Values by name.
            state: Provides the progress of training or evaluation.
            prefix: The prefix of each name.
            is_train: Whether the block is for training.
        """
        progress = _progress_of_training(state) if is_train else _progress_of_evaluation(state)
        lines = [f"\n\t {prefix}{name}: {format_log_data_value(value)}" for name, value in data.items()]
        # People read columns; programs read files and pipes.
        is_read = is_notebook() or getattr(self._file(), "isatty", lambda: False)()
        tables = {name: f"\n{text}" for name, text in self._tables_as_text.items()} if is_read else self.tables
        lines += [f"\n\t {prefix}{name}: {table}" for name, table in tables.items()]
        self._write(progress + (":" if progress and data else "") + "".join(lines))

    def _show_training(self, state: State) -> None:
        self.log_to_console(self.logged_metrics, state, prefix="Train ")
        self.logged_metrics.clear()
        self._last_batch = state.timestamp.num_batches


def _progress_of_training(state: State) -> str:
    duration = state.max_duration
    if duration is None:
        return ""
    if duration.unit != TimeUnit.EPOCH:
        now = state.timestamp.get(duration.unit).value
        return f"[{duration.unit.name.lower()}={now}/{duration.value}]"
    stamp, length = state.timestamp, state.dataloader_len
    epoch, batch = stamp.num_epochs + 1, stamp.num_batches_in_epoch
    if batch == 0 and epoch > 1:  # at EPOCH_END, the timestamp already counts the epoch that has just ended
        before = state.previous_timestamp
        epoch, batch = epoch - 1, int(before.batch_in_epoch) if before is not None else 0
    return f"[epoch={epoch}][batch={batch}{'' if length is None else f'/{int(length)}'}]"


def _progress_of_evaluation(state: State) -> str:
    length = state.dataloader_len
    batch = state.eval_timestamp.num_batches
    return f"[Eval batch={batch}{'' if length is None else f'/{int(length)}'}] Eval on {state.dataloader_label} data"
