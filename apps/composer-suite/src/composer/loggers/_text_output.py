"""Loggers that write text for people: facts and results of a run, metrics in blocks, and progress bars."""

import io
import json
import math
import os
import re
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from textwrap import TextWrapper
from typing import Any, Final, TextIO, cast

import tqdm.auto
import tqdm.std

from composer.loggers._run_lines import BestResults, end_lines, start_lines
from composer.loggers._service_queue import as_number
from composer.utils.notebook import is_notebook
from composer_dist import get_global_rank, get_local_rank
from composer_events.arguments import to_time
from composer_events.logger import Logger
from composer_events.logger_destination import BufferedDestination, LoggedMetrics, format_log_data_value
from composer_events.state import State
from composer_time import Time, Timestamp, TimeUnit

__all__ = ["ConsoleLogger", "NUM_EVAL_LOGGING_EVENTS", "ProgressBarLogger"]


def table_as_json(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as pandas' `to_json(orient='split', index=False)` does, with non-ASCII characters unescaped.

    Example:
        >>> table_as_json(["a", "b"], [[1, "x"]])
        '{"columns":["a","b"],"data":[[1,"x"]]}'
    """
    table = {"columns": list(columns), "data": [list(row) for row in rows]}
    return json.dumps(table, separators=(",", ":"), ensure_ascii=False, default=_to_json)


def _to_json(value: Any) -> Any:
    """Convert NumPy values and tensors to numbers or lists, and other objects to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


_RESULTS = ("loss/train/", "metrics/")


class TextLogger(BufferedDestination):
    """Base class of loggers that write text to a stream.

    Rank 0 also describes the run at its start, after each evaluation and at its end.
    """

    takes_latest = True

    def __init__(self, stream: str | TextIO, log_traces: bool) -> None:
        name = stream.lower() if isinstance(stream, str) else None
        if name not in (None, "stdout", "stderr") or (name is None and not callable(getattr(stream, "write", None))):
            kind = ValueError if isinstance(stream, str) else TypeError
            raise kind(f"stream={stream!r} must be 'stderr', 'stdout' or a text stream.")
        self.should_log_traces = log_traces
        self.hparams: dict[str, Any] = {}
        self._stream: str | TextIO = stream if name is None else name
        self._has_described = False
        self._results: dict[str, Any] = {}  # the latest losses and metrics
        self._best = BestResults()
        self._fit_began_s = time.monotonic()
        self._planned: Time[Any] | None = None

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Store hyperparameters in `hparams`."""
        self.hparams.update(hyperparameters)

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Write the actions of algorithms, if `log_traces` is set."""
        if self.should_log_traces:
            for name, trace in traces.items():
                self._write(f"[trace]: {name}: {format_log_data_value(trace)}")

    def take_metrics(self, logged: Sequence[LoggedMetrics]) -> None:
        """Store the latest value of each metric. Values are read only when they are written."""
        latest: dict[str, Any] = {}
        for metrics, _, _, _ in logged:
            latest.update(metrics)
        latest = {str(name): value for name, value in latest.items()}
        self._results |= {name: value for name, value in latest.items() if name.startswith(_RESULTS)}
        self._keep(latest)

    @abstractmethod
    def _keep(self, metrics: dict[str, Any]) -> None:
        """Store metrics for the output of the subclass."""

    def state_dict(self) -> dict[str, Any]:
        """Return the best results of the evaluations so far."""
        return {"best": {name: list(best) for name, best in self._best.found.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best results. Checkpoints of Composer's progress bar do not have any."""
        self._best.found = {name: (value, moment) for name, (value, moment) in state.get("best", {}).items()}

    def fit_start(self, state: State, logger: Logger) -> None:
        """Describe the run."""
        self._describe(state)
        self._fit_began_s, self._planned = time.monotonic(), state.max_duration

    def predict_start(self, state: State, logger: Logger) -> None:
        """Describe the run."""
        self._describe(state)

    def eval_start(self, state: State, logger: Logger) -> None:
        """Describe the run, and remove the results of the previous evaluation."""
        self._describe(state)
        self.catch_up()
        prefix = f"metrics/{state.dataloader_label}/"
        self._results = {name: value for name, value in self._results.items() if not name.startswith(prefix)}

    def show_end(self, state: State, run_folders: Sequence[str]) -> None:
        """Describe the end of training; `run_folders` are those of the recorders."""
        self.catch_up()
        total = {"loss": self._results["loss/train/total"]} if "loss/train/total" in self._results else {}
        evaluations = {
            f"{each.label}/{name}": value
            for each in state.evaluators
            for name, value in self._results_of(each.label).items()
        }
        is_early = self._planned is not None and state.timestamp < self._planned
        seconds = time.monotonic() - self._fit_began_s
        self._write_on_rank_0(end_lines(state, seconds, is_early, total | evaluations, run_folders))

    def _results_of(self, label: str | None) -> dict[str, Any]:
        prefix = f"metrics/{label}/"
        return {name.removeprefix(prefix): value for name, value in self._results.items() if name.startswith(prefix)}

    def _describe(self, state: State) -> None:
        if not self._has_described:
            self._has_described = True
            self._write_on_rank_0(start_lines(state, self.hparams))

    def _write_on_rank_0(self, lines: Sequence[str]) -> None:
        stream = self._file()
        if not lines or get_global_rank() != 0:
            return
        if hasattr(stream, "isatty") and stream.isatty():  # break lines between words
            wrap = TextWrapper(
                _width_of(stream), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            ).fill
            lines = [wrap(line) for line in lines]
        self._write("\n".join(lines))

    def _write(self, text: str) -> None:
        stream = self._file()
        stream.write(text + "\n")
        stream.flush()

    def _file(self) -> TextIO:
        # Looked up at each write, to follow redirections of the stream.
        return getattr(sys, self._stream) if isinstance(self._stream, str) else self._stream


_LEAST_WIDTH = 40  # a terminal may report a width of 0


def _width_of(terminal: TextIO) -> int:
    # Without the last columns, into which the terminal writes the ^C of an interrupt.
    return max(os.get_terminal_size(terminal.fileno()).columns, _LEAST_WIDTH) - len("^C ")


_DEEPEST = 50  # levels, far below the recursion limit


def to_plain(value: Any, outer: tuple[int, ...] = ()) -> Any:
    """Convert a value for JSON: unsupported keys and objects, and recursive containers, become text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    within = (*outer, id(value))  # the containers around an item, to detect one that contains itself
    if isinstance(value, (Mapping, list, tuple)) and id(value) not in outer and len(outer) < _DEEPEST:
        if isinstance(value, Mapping):
            return {_text(key): to_plain(item, within) for key, item in cast("Mapping[Any, Any]", value).items()}
        return [to_plain(item, within) for item in cast("list[Any]", value)]
    return _text(value)


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # a foreign object's __str__ may raise anything
        return f"<{type(value).__name__}: {type(error).__name__}>"


_BATCH: Final = TimeUnit.BATCH  # looking up an enum member is slow in Python 3.11, and this is needed in each batch

NUM_EVAL_LOGGING_EVENTS = 11
"""Maximum number of progress lines in one evaluation."""


class ConsoleLogger(TextLogger):
    """Logger that writes training metrics at intervals, and evaluation metrics after each evaluation, as text.

    Each block contains the latest values logged since the previous one, without the `time/` and `trainer/` counters
    during training, and all tables, each as a line of JSON. Every rank writes metrics, and rank 0 also describes the
    run.

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
        self.log_interval: Time[Any] = _to_log_interval(log_interval)
        self._logged: dict[str, Any] = {}
        self.tables: dict[str, str] = {}
        self.eval_batch_idxs_to_log: list[int] = []
        self._last_batch: int | None = None  # of the latest block of training

    def _keep(self, metrics: dict[str, Any]) -> None:
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
        super().eval_start(state, logger)
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
        """Write the results of the evaluation, and the best ones so far."""
        self.log_to_console(self.logged_metrics, state, prefix="Eval ", is_train=False)
        self.logged_metrics.clear()
        self._write_on_rank_0(self._best.lines(state, self._results_of(state.dataloader_label)))

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
        lines += [f"\n\t {prefix}{name}: {table}" for name, table in self.tables.items()]
        self._write(progress + (":" if progress and data else "") + "".join(lines))

    def _show_training(self, state: State) -> None:
        shown = {name: value for name, value in self.logged_metrics.items() if not str(name).startswith(_COUNTERS)}
        self.log_to_console(shown, state, prefix="Train ")
        self.logged_metrics.clear()
        self._last_batch = state.timestamp.num_batches


_COUNTERS = ("time/", "trainer/")


def _to_log_interval(given: int | str | Time[int]) -> Time[Any]:
    interval: Time[Any] = to_time("console_log_interval", given, TimeUnit.EPOCH)
    if interval.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH):
        raise ValueError(
            f"The `console_log_interval` argument must have units of EPOCH or BATCH. {given!r} has "
            f"{interval.unit.name}. Give epochs ('1ep') or batches ('10ba')."
        )
    if interval.value < 1:
        raise ValueError(f"console_log_interval={given!r} must be 1 or more.")
    return interval


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


_REDRAWN_S = 0.5  # faster updates are unreadable, and drawing takes as long as a hundred callbacks
_WRITTEN_S = 10.0  # a file grows by 9000 lines a day


class ProgressBarLogger(TextLogger):
    """Logger that shows the progress of training and evaluation, with the latest loss and metrics.

    On a terminal or in a notebook, it draws bars, and each evaluation ends in a line with its results. If the duration
    is in epochs, there is one bar per epoch, otherwise a single one. To any other stream, such as a file, it writes
    the same as lines. Only local rank 0 shows bars, and rank 0 describes the run before the first one.

    Args:
        stream: `'stderr'`, `'stdout'` or a text stream.
        log_traces: Whether to also write the actions of algorithms, above the bars.
        log_interval: The interval of the lines of training in a file, in epochs (`'1ep'`, or a bare number) or batches
            (`'10ba'`). By default a line at the end of each epoch, and in an epoch one every 10 seconds at most.

    Raises:
        ValueError: If the stream is another string, or the interval is in another unit.
    """

    def __init__(
        self,
        stream: str | TextIO = "stderr",
        log_traces: bool = False,
        log_interval: int | str | Time[int] | None = None,
    ) -> None:
        super().__init__(stream, log_traces)
        self._interval = None if log_interval is None else _to_log_interval(log_interval)
        self._shows = get_local_rank() == 0
        self._train: _Bar | None = None
        self._eval: _Bar | None = None

    def _keep(self, metrics: dict[str, Any]) -> None:
        for bar in (self._train, self._eval):
            if bar is not None:
                bar.keep(metrics)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Describe the run, and open the training bar if training resumes within an epoch."""
        super().fit_start(state, logger)
        if state.timestamp.num_batches_in_epoch:
            self.epoch_start(state, logger)

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Open the training bar: of this epoch, or of the whole training."""
        if self._shows and self._train is None and state.max_duration is not None:
            self.catch_up()  # consume values logged earlier, which must not appear in this bar
            self._train = self._open_training(state, state.max_duration)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Advance the training bar."""
        if self._train is None:  # custom loops may omit EPOCH_START
            self.epoch_start(state, logger)
        if self._train is not None:
            self._advance(self._train, state.timestamp, self._interval)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Close the bar if it is that of an epoch, not of the whole training."""
        interval = self._interval
        if self._train is not None and self._train.is_of_one_epoch:
            is_due = interval is None or (
                interval.unit is TimeUnit.EPOCH and state.timestamp.num_epochs % interval.value == 0
            )
            self._train = self._closed(self._train, is_due)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Close the training bar."""
        self._train = self._closed(self._train)

    def eval_start(self, state: State, logger: Logger) -> None:
        """Open the bar of one evaluation."""
        super().eval_start(state, logger)
        if self._shows:
            self._eval = self._open_evaluation(state)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Advance the bar of the evaluation."""
        if self._eval is not None:
            self._advance(self._eval, state.eval_timestamp)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Replace the bar of the evaluation by a line with the results, and the best ones so far."""
        self._eval = self._closed(self._eval, False)
        self.catch_up()
        self._write_on_rank_0(self._best.lines(state, self._results_of(state.dataloader_label)))

    def close(self, state: State, logger: Logger) -> None:
        """Close the open bars."""
        self._train = self._closed(self._train)
        self._eval = self._closed(self._eval, False)

    def leave_bars(self) -> None:
        """Leave the open bars as they are, so that a traceback begins a line. This does not read from a device."""
        for bar in (self._eval, self._train):
            if bar is not None:
                bar.leave()
        self._train = self._eval = None

    def _advance(self, bar: "_Bar", stamp: Timestamp, interval: Time[Any] | None = None) -> None:
        is_shown = bar.is_due(stamp, interval)
        if is_shown:  # only then the values are read, which may wait for the device
            self.catch_up()
        bar.move(stamp, is_shown)

    def _closed(self, bar: "_Bar | None", is_shown: bool = True) -> None:
        """Show a bar one last time with the final values, and close it."""
        if bar is not None:
            self.catch_up()
            bar.close(is_shown)

    def _open_training(self, state: State, duration: Time[Any]) -> "_Bar":
        label, shown = state.dataloader_label or "train", ("loss/train/", "metrics/train/")
        if duration.unit == TimeUnit.EPOCH:
            length = state.dataloader_len
            title = f"{label} epoch {state.timestamp.num_epochs + 1}/{duration.value}"
            total = None if length is None else int(length)
            return _Bar(self._file(), title, total, TimeUnit.BATCH, state.timestamp, shown, of_one_epoch=True)
        return _Bar(self._file(), label, int(duration), duration.unit, state.timestamp, shown)

    def _open_evaluation(self, state: State) -> "_Bar":
        label, length = state.dataloader_label or "eval", state.dataloader_len
        total = None if length is None else int(length)
        return _Bar(
            self._file(), label, total, TimeUnit.BATCH, state.eval_timestamp, (f"metrics/{label}/",), stays=False
        )

    def _write(self, text: str) -> None:
        if self._shows:
            stream = self._file()
            # Clears the bars, writes the text and draws them again below it. Of the base class, which tests do not
            # replace as they do the one in `tqdm.auto`.
            tqdm.std.tqdm.write(text, file=stream)
            if hasattr(stream, "flush"):
                stream.flush()


def is_progress_bar(callback: object) -> bool:
    """Return whether a callback is a progress bar that shows the latest results now and then, at no given batch."""
    if type(callback) is not ProgressBarLogger or "log_metrics" in vars(callback):
        return False
    interval = callback._interval
    return interval is None or interval.unit is TimeUnit.EPOCH


class _Bar:
    """A tqdm bar that follows a counter of a timestamp, or lines of text where no bar can be drawn."""

    def __init__(
        self,
        stream: TextIO,
        title: str,
        total: int | None,
        unit: TimeUnit,
        start: Timestamp,
        shown: tuple[str, ...],
        *,
        of_one_epoch: bool = False,
        stays: bool = True,
    ) -> None:
        self.is_of_one_epoch = of_one_epoch
        self._unit = unit
        self._total = total
        self._shown = shown
        self._values: dict[str, Any] = {}
        self._position = self._count(start)
        is_widget = is_notebook()  # sets its own width
        is_drawn = is_widget or (hasattr(stream, "isatty") and stream.isatty())
        self._terminal = stream if is_drawn and not is_widget else None
        self._lines = None if is_drawn else stream
        self._written_at = -1  # position of the latest line
        self._shown_s = time.monotonic()
        title = title.replace("{", "{{").replace("}", "}}")
        bar = " |{bar}|" if is_drawn else ":"
        self._bar = tqdm.auto.tqdm(
            total=total,
            initial=self._position,
            # The values come first, since a narrow terminal shows only the beginning of a line.
            bar_format=title + "{postfix}" + bar + " {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]",
            unit=unit.value,
            # `move` decides when the bar is drawn.
            mininterval=0,
            miniters=math.inf,
            maxinterval=math.inf,
            file=stream if is_drawn else io.StringIO(),
            ncols=None if self._terminal is None else _width_of(self._terminal),
            leave=stays,
        )

    def keep(self, metrics: dict[str, Any]) -> None:
        # Losses first.
        for name, value in sorted(metrics.items(), key=lambda item: not item[0].startswith("loss/")):
            if name.startswith(self._shown):
                self._values[_short(name)] = value

    def is_due(self, stamp: Timestamp, interval: Time[Any] | None) -> bool:
        """Return whether the next move is shown: at an interval of lines, or after a time."""
        if interval is None or self._lines is None:
            return time.monotonic() - self._shown_s >= (_REDRAWN_S if self._lines is None else _WRITTEN_S)
        return interval.unit is _BATCH and stamp.num_batches % interval.value == 0

    def move(self, stamp: Timestamp, is_shown: bool) -> None:
        position = self._count(stamp)
        if is_shown:
            self._set_values()
        self._bar.miniters = 0 if is_shown and self._lines is None else math.inf
        self._bar.update(position - self._position)
        self._position = position
        if is_shown:
            self._write_line()

    def close(self, is_shown: bool) -> None:
        self._set_values()
        if is_shown:
            self._write_line()
        self._bar.close()

    def leave(self) -> None:
        with suppress(OSError, ValueError):  # the stream may be closed
            self._bar.close()

    def _set_values(self) -> None:
        self._shown_s = time.monotonic()
        if self._terminal is not None:
            self._bar.ncols = _width_of(self._terminal)
        values = {name: as_number(value) for name, value in self._values.items()}
        self._bar.set_postfix({name: value for name, value in values.items() if value is not None}, refresh=False)

    def _write_line(self) -> None:
        if self._lines is not None and self._written_at != self._position:
            self._written_at = self._position
            self._lines.write(f"{self._bar}\n")
            if hasattr(self._lines, "flush"):
                self._lines.flush()

    def _count(self, stamp: Timestamp) -> int:
        if self.is_of_one_epoch:
            return stamp.num_batches_in_epoch
        count = stamp.num_batches if self._unit is _BATCH else stamp.get(self._unit).value
        # The last batch may have more samples or tokens than are left.
        return count if self._total is None else min(count, self._total)


# Of torchmetrics and composer_models.
_KIND = re.compile(r"(Multiclass|Multilabel|Binary|Language)(?=[A-Z])")


def _short(name: str) -> str:
    """Shorten a name, to fit in 80 columns: `loss` for the total, and `Accuracy` for `MulticlassAccuracy`."""
    name = name.split("/", 2)[-1]
    return "loss" if name == "total" else _KIND.sub("", name)
