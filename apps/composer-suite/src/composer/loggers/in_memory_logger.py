"""Logger that keeps all values in memory."""

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from composer.loggers._text_output import table_as_json
from composer_events.logger import Logger
from composer_events.logger_destination import BufferedDestination, LoggedMetrics, restored
from composer_events.state import State
from composer_time import Timestamp

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["InMemoryLogger"]


class InMemoryLogger(BufferedDestination):
    """Logger that keeps all values in memory, with the timestamp of each.

    Attributes:
        hyperparameters: The settings of the run.
        tables: The tables by name, as JSON.
        state: The training state, set at INIT.
    """

    copies_values = True

    def __init__(self) -> None:
        self._data: dict[str, list[tuple[Timestamp, Any]]] = {}
        # Values and timestamps of each call, in two lists: the tuples of one list would slow down garbage collection.
        self._unsorted: list[dict[str, Any]] = []
        self._stamps: list[Timestamp] = []
        self.hyperparameters: dict[str, Any] = {}
        self.tables: dict[str, str] = {}
        self.state: State | None = None

    def init(self, state: State, logger: Logger) -> None:
        """Store the state, which provides the timestamps."""
        self.state = state

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Store hyperparameters."""
        self.hyperparameters.update(hyperparameters)

    def take_metrics(self, logged: Sequence[LoggedMetrics]) -> None:
        """Store metrics with their timestamp. Tensors stay on their device."""
        for _, copies, timestamp, _ in logged:
            if timestamp is None:
                assert self.state is not None, "Event.INIT comes first"
                timestamp = self.state.timestamp.copy()
            # Grouped by metric only when `data` is read, to save time in training.
            self._stamps.append(timestamp)
            self._unsorted.append(copies)

    @property
    def data(self) -> dict[str, list[tuple[Timestamp, Any]]]:
        """The values of each metric, with timestamps."""
        self.catch_up()
        for now, values in zip(self._stamps, self._unsorted, strict=True):
            for name, value in values.items():
                self._data.setdefault(name, []).append((now, restored(value)))
        self._stamps.clear()
        self._unsorted.clear()
        return self._data

    @property
    def most_recent_values(self) -> dict[str, Any]:
        """The latest value of each metric."""
        return {name: entries[-1][1] for name, entries in self.data.items()}

    @property
    def most_recent_timestamps(self) -> dict[str, Timestamp]:
        """The timestamp of the latest value of each metric."""
        return {name: entries[-1][0] for name, entries in self.data.items()}

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Store the table as JSON."""
        self.tables[name] = table_as_json(columns, rows)

    def get_timeseries(self, metric: str) -> "dict[str, NDArray[Any]]":
        """Return the values of a metric, and each field of their timestamps.

        Args:
            metric: The name of the metric.

        Returns:
            Arrays of equal length by name. The values are under the metric's name, and durations are in seconds.

        Raises:
            ValueError: If the metric has not been logged.
        """
        import numpy as np  # here, because nothing else in this module needs it

        if metric not in self.data:
            raise ValueError(f"metric={metric!r} has not been logged. Logged were: {', '.join(self.data) or 'none'}.")
        series: dict[str, list[Any]] = {}
        for stamp, value in self.data[metric]:
            for name, field in {metric: value, **stamp.state_dict()}.items():
                number: Any = field.total_seconds() if isinstance(field, datetime.timedelta) else field
                series.setdefault(name, []).append(number.item() if hasattr(number, "item") else number)
        return {name: np.array(values) for name, values in series.items()}
