"""Progress bars of tqdm for training and for each evaluation."""

from collections.abc import Sequence
from typing import Any, TextIO

import tqdm.auto

from composer.loggers._logged_values import as_number
from composer.loggers._text_output import TextLogger
from composer.utils.notebook import is_notebook
from composer_dist import get_local_rank
from composer_events.logger import Logger
from composer_events.logger_destination import LoggedMetrics
from composer_events.state import State
from composer_time import Time, Timestamp, TimeUnit

__all__ = ["ProgressBarLogger"]

_BATCH = TimeUnit.BATCH  # looking up an enum member is slow in Python 3.11, and this is needed in each batch
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
