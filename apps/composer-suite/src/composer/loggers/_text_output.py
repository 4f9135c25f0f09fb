"""Loggers that write text for people: settings of a run, tables, metrics in blocks, and progress bars."""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TextIO, cast

import tqdm.auto

from composer.loggers._service_queue import as_number
from composer.utils.notebook import is_notebook
from composer_dist import get_local_rank
from composer_events.arguments import to_time
from composer_events.hparams import convert_flat_dict_to_nested_dict
from composer_events.logger import Logger
from composer_events.logger_destination import BufferedDestination, LoggedMetrics, format_log_data_value
from composer_events.state import State
from composer_time import Time, Timestamp, TimeUnit

__all__ = ["ConsoleLogger", "NUM_EVAL_LOGGING_EVENTS", "ProgressBarLogger"]

_RULE = "*" * 30
# Strings that YAML reads without quotes, also in lists.
_PLAIN = re.compile(r"[A-Za-z_/][\w./()=+<>*-]*")
# YAML 1.1 reads these words as booleans or null.
_OF_OTHER_KINDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def format_config(hyperparameters: Mapping[str, Any]) -> str:
    """Return hyperparameters as YAML between two rules.

    Example:
        >>> print(format_config({"optimizer/lr": 0.1, "seed": 17}))
        ******************************
        Config:
        optimizer:
          lr: 0.1
        seed: 17
        ******************************
    """
    named = {str(name): value for name, value in hyperparameters.items()}
    with suppress(ValueError):  # a name that is also a prefix of others cannot be nested
        named = convert_flat_dict_to_nested_dict(named)
    lines = _to_yaml(to_plain(named))
    return "\n".join([_RULE, "Config:", *lines, _RULE])


def _to_yaml(values: Mapping[str, Any], indent: str = "") -> list[str]:
    """Convert nested settings to lines of YAML."""
    lines: list[str] = []
    for name, value in sorted(values.items()):
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{_scalar(name)}:", *_to_yaml(value, indent + "  ")]
        else:
            lines.append(f"{indent}{_scalar(name)}: {_scalar(value)}")
    return lines


def _scalar(value: Any) -> str:
    """Convert a value to YAML, which includes JSON's strings, numbers and lists."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _OF_OTHER_KINDS:
        return value
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_scalar(name)}: {_scalar(item)}' for name, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    if isinstance(value, float):
        return _float(value)
    # Escape characters that YAML readers or the console reject.
    return json.dumps(value, ensure_ascii=not (isinstance(value, str) and value.isprintable()))


def _float(value: float) -> str:
    if math.isfinite(value):
        text = repr(float(value))
        return text if "." in text or "e" not in text else text.replace("e", ".0e")  # YAML 1.1 needs the dot
    return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"


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


class TextLogger(BufferedDestination):
    """Base class of loggers that write text to a stream, beginning with the settings of the run."""

    def __init__(self, stream: str | TextIO, log_traces: bool) -> None:
        name = stream.lower() if isinstance(stream, str) else None
        if name not in (None, "stdout", "stderr") or (name is None and not callable(getattr(stream, "write", None))):
            kind = ValueError if isinstance(stream, str) else TypeError
            raise kind(f"stream={stream!r} must be 'stderr', 'stdout' or a text stream.")
        self.should_log_traces = log_traces
        self.hparams: dict[str, Any] = {}
        self._stream: str | TextIO = stream if name is None else name
        self._has_shown_hparams = False

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Store hyperparameters, which are written when the run starts."""
        self.hparams.update(hyperparameters)

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Write the actions of algorithms, if `log_traces` is set."""
        if self.should_log_traces:
            for name, trace in traces.items():
                self._write(f"[trace]: {name}: {format_log_data_value(trace)}")

    def fit_start(self, state: State, logger: Logger) -> None:
        """Write the settings of the run."""
        self._show_hparams()

    predict_start = fit_start

    def _show_hparams(self) -> None:
        if not self._has_shown_hparams and get_local_rank() == 0:
            self._has_shown_hparams = True
            self._write(format_config(self.hparams))

    def _write(self, text: str) -> None:
        stream = self._file()
        stream.write(text + "\n")
        stream.flush()

    def _file(self) -> TextIO:
        # Looked up at each write, to follow redirections of the stream.
        return getattr(sys, self._stream) if isinstance(self._stream, str) else self._stream


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

    Each block contains the latest values logged since the previous one, and all tables, each as a line of JSON. Every
    rank writes metrics, and local rank 0 also writes the settings of the run.

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
        lines += [f"\n\t {prefix}{name}: {table}" for name, table in self.tables.items()]
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


_LABEL_WIDTH = 15
_REDRAWN_S = 0.5  # faster updates are unreadable, and drawing takes as long as a hundred callbacks
_FILE_WIDTH = 200  # characters; wide, since truncated metrics in a file would be useless


class ProgressBarLogger(TextLogger):
    """Logger that shows the progress of training and evaluation, with the loss and the evaluation's metrics.

    The bars are lines in a terminal or widgets in a notebook. Only local rank 0 shows them, and writes the settings of
    the run before the first one. If the duration is in epochs, there is one bar per epoch, otherwise a single one.

    Args:
        stream: `'stderr'`, `'stdout'` or a text stream.
        log_traces: Whether to also write the actions of algorithms, above the bars.

    Raises:
        ValueError: If the stream is another string.
    """

    def __init__(self, stream: str | TextIO = "stderr", log_traces: bool = False) -> None:
        super().__init__(stream, log_traces)
        self._shows = get_local_rank() == 0
        self._train: _Bar | None = None
        self._eval: _Bar | None = None

    def take_metrics(self, logged: Sequence[LoggedMetrics]) -> None:
        """Store the values that a bar shows. They are read only when the bar is redrawn."""
        latest: dict[str, Any] = {}
        for metrics, _, _, _ in logged:
            latest.update(metrics)
        for bar in (self._train, self._eval):
            if bar is not None:
                bar.keep(latest)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Write the settings of the run, and open the training bar if training resumes within an epoch."""
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
        if self._train is not None and self._train.move(state.timestamp):
            self._show(self._train)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Close the bar if it is that of an epoch, not of the whole training."""
        if self._train is not None and self._train.is_of_one_epoch:
            self._train = self._closed(self._train)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Close the training bar."""
        self._train = self._closed(self._train)

    def eval_start(self, state: State, logger: Logger) -> None:
        """Open the bar of one evaluation."""
        self._show_hparams()
        if self._shows:
            self.catch_up()
            self._eval = self._open_evaluation(state)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Advance the bar of the evaluation."""
        if self._eval is not None and self._eval.move(state.eval_timestamp):
            self._show(self._eval)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Close the bar of the evaluation."""
        self._eval = self._closed(self._eval)

    def close(self, state: State, logger: Logger) -> None:
        """Close the open bars."""
        self._train = self._closed(self._train)
        self._eval = self._closed(self._eval)

    def _show(self, bar: "_Bar") -> None:
        self.catch_up()
        bar.show()

    def _closed(self, bar: "_Bar | None") -> None:
        """Draw a bar one last time with the final values, and close it."""
        if bar is not None:
            self._show(bar)
            bar.close()

    def _open_training(self, state: State, duration: Time[Any]) -> "_Bar":
        label = f"{state.dataloader_label or 'train':{_LABEL_WIDTH}}"
        if duration.unit == TimeUnit.EPOCH:
            length = state.dataloader_len
            title = f"{label}Epoch {state.timestamp.num_epochs:3}: "
            total = None if length is None else int(length)
            return _Bar(self._file(), title, total, TimeUnit.BATCH, state.timestamp, ("loss/train",), of_one_epoch=True)
        title = f"{label}{duration.unit.name.capitalize():10}: "
        return _Bar(self._file(), title, int(duration), duration.unit, state.timestamp, ("loss/train",))

    def _open_evaluation(self, state: State) -> "_Bar":
        label = f"{state.dataloader_label or 'eval':{_LABEL_WIDTH}}"
        stamp = state.timestamp
        # At the end of an epoch, the timestamp already counts the epoch that the evaluation belongs to.
        at_epoch_end = stamp.num_batches_in_epoch == 0
        where = f"Epoch {max(stamp.num_epochs - 1, 0):3}: " if at_epoch_end else f"Batch {stamp.num_batches:3}: "
        length = state.dataloader_len
        total = None if length is None else int(length)
        return _Bar(self._file(), label + where, total, TimeUnit.BATCH, state.eval_timestamp, ("metrics/",))

    def _write(self, text: str) -> None:
        if self._shows:
            # `tqdm.write` clears the bars, writes the text and draws them again below it.
            tqdm.auto.tqdm.write(text, file=self._file())


class _Bar:
    """A tqdm bar that follows a counter of a timestamp."""

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
    ) -> None:
        self.is_of_one_epoch = of_one_epoch
        self._unit = unit
        self._shown = shown
        self._values: dict[str, Any] = {}
        self._position = self._count(start)
        is_terminal = hasattr(stream, "isatty") and stream.isatty()
        # A notebook's widget sets its own width. Elsewhere, the bar itself has 25 characters.
        is_widget = is_notebook()
        bar_format = " {l_bar}{bar}{r_bar}" if is_widget else " {l_bar}{bar:25}{r_bar}"
        # On a terminal, a blank bar (`b`) fills the rest of the line, which erases an earlier, longer text.
        self._bar = tqdm.auto.tqdm(
            total=total,
            initial=self._position,
            bar_format=title + bar_format + ("{bar:-1b}" if is_terminal else ""),
            unit=unit.value,
            mininterval=_REDRAWN_S,
            file=stream,
            dynamic_ncols=is_terminal,
            ncols=None if is_terminal or is_widget else _FILE_WIDTH,
        )

    def keep(self, metrics: dict[str, Any]) -> None:
        """Store the values that belong to this bar."""
        for name, value in zip(map(str, metrics), metrics.values(), strict=True):
            if name.startswith(self._shown) and not name.startswith("metrics/train"):
                # Without the label of the evaluator, which is in the title, to save space.
                self._values[name.split("/", 2)[-1] if name.startswith("metrics/") else name] = value

    def move(self, stamp: Timestamp) -> bool:
        """Advance to a timestamp, and return whether the bar was redrawn, and its values need to be read."""
        position = self._count(stamp)
        is_drawn = bool(self._bar.update(position - self._position))
        self._position = position
        return is_drawn

    def show(self) -> None:
        """Set the values next to the bar. They appear with its next update: a refresh here would draw it twice."""
        values = {name: as_number(value) for name, value in self._values.items()}
        self._bar.set_postfix({name: value for name, value in values.items() if value is not None}, refresh=False)

    def close(self) -> None:
        """Draw the bar one last time, and leave it on the screen."""
        self._bar.close()

    def _count(self, stamp: Timestamp) -> int:
        if self.is_of_one_epoch:
            return stamp.num_batches_in_epoch
        return stamp.num_batches if self._unit is _BATCH else stamp.get(self._unit).value
