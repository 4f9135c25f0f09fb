"""Logger that algorithms, callbacks and the training loop use."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence, Set
from pathlib import Path
from typing import Any, Final

from composer_events.arguments import overrides
from composer_events.batches import ensure_tuple
from composer_events.formatting import format_name_with_dist
from composer_events.logger_destination import LoggerDestination, MetricBuffer, takes_late
from composer_events.state import State

__all__ = ["Logger", "log_lazily"]

_VERBS: Final = ("log_hyperparameters", "log_metrics", "log_table", "log_images", "log_traces", "upload_file")


class Logger:
    """Passes each value to the destinations that accept its kind.

    The destinations for each kind are determined once, so logging a value that none accepts costs a look-up.

    Args:
        state: The training state; its batch count is the default `step`.
        destinations: One destination, several, or none.

    Attributes:
        destinations: The destinations, as a tuple. Assign one, a sequence, a set or `None` to change them.

    Example:
        >>> from types import SimpleNamespace
        >>> from composer_time import Timestamp
        >>> class Show(LoggerDestination):
        ...     def log_metrics(self, metrics, step=None):
        ...         print(step, metrics)
        >>> logger = Logger(SimpleNamespace(timestamp=Timestamp(batch=3)), Show())
        >>> logger.log_metrics({"loss": 0.5})
        3 {'loss': 0.5}
    """

    def __init__(
        self,
        state: State,
        destinations: LoggerDestination | Sequence[LoggerDestination] | Set[LoggerDestination] | None = None,
    ) -> None:
        self._state = state
        self._buffer = MetricBuffer(self._sort)
        self.destinations = destinations

    @property
    def destinations(self) -> tuple[LoggerDestination, ...]:
        """The destinations of values and files."""
        return self._destinations

    @destinations.setter
    def destinations(
        self, destinations: LoggerDestination | Sequence[LoggerDestination] | Set[LoggerDestination] | None
    ) -> None:
        # `ensure_tuple` counts a set as one element.
        several = tuple(destinations) if isinstance(destinations, Set) else destinations
        self._destinations: tuple[LoggerDestination, ...] = ensure_tuple(several)
        self._takers = {
            verb: tuple(place for place in self._destinations if overrides(place, LoggerDestination, verb))
            for verb in _VERBS
        }
        self._sort()

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        """Log the settings of the run.

        Args:
            parameters: By name.
        """
        for destination in self._takers["log_hyperparameters"]:
            destination.log_hyperparameters(parameters)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log numbers measured at one step.

        Args:
            metrics: By name. Tensors may stay on their device; a destination that reads them moves them.
            step: The count of batches that they belong to; by default the state's.
        """
        if self._note is not None:
            self._note(metrics, self._state.timestamp, step)
        if takers := self._at_once:
            if step is None:
                step = self._state.timestamp.batch.value
            for destination in takers:
                destination.log_metrics(metrics, step)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Log a table.

        Args:
            columns: Names of the columns.
            rows: A list of cells for each row.
            name: Name of the table.
            step: The count of batches that it belongs to; by default the state's.
        """
        if takers := self._takers["log_table"]:
            step = self._current_batch() if step is None else step
            for destination in takers:
                destination.log_table(columns, rows, name, step)

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: dict[str, Any] | None = None,
        mask_class_labels: dict[int, str] | None = None,
        use_table: bool = True,
    ) -> None:
        """Log images.

        Args:
            images: An array, a tensor, or a sequence of them; each an image or a stack of images.
            name: Name of the group of images.
            channels_last: Whether channels are the last axis, not the one before height and width.
            step: The count of batches that they belong to; by default the state's.
            masks: Segmentation masks by name, as many as images.
            mask_class_labels: Names of the classes in the masks.
            use_table: Whether to show the images in a table, where the destination can.
        """
        if takers := self._takers["log_images"]:
            step = self._current_batch() if step is None else step
            for destination in takers:
                destination.log_images(images, name, channels_last, step, masks, mask_class_labels, use_table)

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Log records of the run's behavior.

        Args:
            traces: By name.
        """
        for destination in self._takers["log_traces"]:
            destination.log_traces(traces)

    def upload_file(self, remote_file_name: str, file_path: str | Path, *, overwrite: bool = False) -> None:
        """Upload a file to the destinations that keep files.

        Args:
            remote_file_name: Name of the uploaded file. Like `file_path` it may use the variables of
                `format_name_with_dist`, such as `{run_name}` and `{rank}`.
            file_path: Path of the local file, which may be changed or deleted as soon as this returns.
            overwrite: Whether a file of that name may be replaced.
        """
        if takers := self._takers["upload_file"]:
            remote_file_name = format_name_with_dist(remote_file_name, self._state.run_name)
            file_path = Path(format_name_with_dist(str(file_path), self._state.run_name))
            for destination in takers:
                destination.upload_file(
                    state=self._state, remote_file_name=remote_file_name, file_path=file_path, overwrite=overwrite
                )

    def takes(self, method: str) -> bool:
        """Return whether any destination accepts what a method of this logger logs.

        Use it before computing an expensive value, such as rendering an image.

        Args:
            method: Name of the method, such as `'log_images'`.

        Raises:
            ValueError: If the logger has no such method.
        """
        if method not in self._takers:
            raise ValueError(f"method={method!r} logs nothing. Use one of {', '.join(self._takers)}.")
        return bool(self._takers[method])

    def flush(self) -> None:
        """Deliver buffered metrics to the destinations that receive many calls at once.

        Such destinations request delivery themselves before they use their metrics.
        """
        self._buffer.deliver()

    def has_file_upload_destination(self) -> bool:
        """Return whether any destination keeps files."""
        return any(destination.can_upload_files() for destination in self._destinations)

    def _sort(self) -> None:
        """Determine which destinations receive metrics late. Called again when a destination's method is replaced."""
        takers = self._takers["log_metrics"]
        late = tuple(place for place in takers if takes_late(place))
        # Cached in attributes, because they are read many times per batch.
        self._at_once = tuple(place for place in takers if not takes_late(place))
        self._note = self._buffer.note if late else None
        self._note_call = self._buffer.note_call if late else None
        if late != self._buffer.destinations:  # the assignment delivers to the old destinations first
            self._buffer.destinations = late

    def _current_batch(self) -> int:
        return self._state.timestamp.batch.value


_LOG_METRICS: Final = Logger.log_metrics  # the original, because tests replace it on the class or on a logger


def log_lazily(
    state: State,
    logger: Logger,
    compute: Callable[..., dict[str, Any]],
    *arguments: Any,
    replaces: Hashable | None = None,
) -> None:
    """Log numbers that are computed only when a destination reads them.

    During a short training step, little Python code and data is in the processor's caches, so a small computation takes
    ten times as long as one of many in a row. If a destination receives metrics immediately, or the logger has another
    `log_metrics`, the numbers are computed immediately.

    Args:
        state: The training state.
        logger: The logger.
        compute: Called with the current timestamp, which it must not change, and `arguments`. Returns metrics by name
            in a new dict; an empty one logs nothing. Its errors are raised where the metrics are read.
        arguments: Further arguments. They must not change any more: numbers, but not the state.
        replaces: A key. Numbers with this key from earlier batches, which must have the same names, are no longer
            computed for destinations that set `takes_latest`. `None` computes them all.

    Example:
        >>> from types import SimpleNamespace
        >>> from composer_time import Timestamp
        >>> def samples_per_sec(now, seconds):
        ...     return {"samples_per_sec": now.num_samples / seconds}
        >>> state = SimpleNamespace(timestamp=Timestamp(sample=64))
        >>> log_lazily(state, Logger(state), samples_per_sec, 0.5)
    """
    log_metrics = logger.log_metrics
    is_usual = getattr(log_metrics, "__func__", None) is _LOG_METRICS and log_metrics.__self__ is logger
    if is_usual and not logger._at_once:  # pyright: ignore[reportPrivateUsage]
        if (note_call := logger._note_call) is not None:  # pyright: ignore[reportPrivateUsage]
            note_call(compute, arguments, state.timestamp, replaces)
    elif metrics := compute(state.timestamp, *arguments):
        logger.log_metrics(metrics)
