"""Everything that was logged, kept in memory."""

import datetime
from typing import TYPE_CHECKING, Any

from composer.loggers._snapshot import detached_copy
from composer.loggers._tables import table_as_json
from composer_events.logger import Logger
from composer_events.logger_destination import LoggerDestination
from composer_events.state import State
from composer_time import Timestamp

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["InMemoryLogger"]


class InMemoryLogger(LoggerDestination):
    """Keeps what is logged, with the time in training at which it was.

    Attributes:
        data: For each metric, its values with the timestamps.
        most_recent_values: The latest value of each metric.
        most_recent_timestamps: When that was.
        hyperparameters: The settings of the run.
        tables: The tables by name, as JSON.
        state: The training state, from INIT on.
    """

    def __init__(self) -> None:
        self.data: dict[str, list[tuple[Timestamp, Any]]] = {}
        self.most_recent_values: dict[str, Any] = {}
        self.most_recent_timestamps: dict[str, Timestamp] = {}
        self.hyperparameters: dict[str, Any] = {}
        self.tables: dict[str, str] = {}
        self.state: State | None = None

    def init(self, state: State, logger: Logger) -> None:
        """Find out where the time is."""
        self.state = state

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Keep the settings of the run."""
        self.hyperparameters.update(hyperparameters)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep values, with the timestamp of now; tensors stay on their device."""
        assert self.state is not None, "Event.INIT comes first"
        now = self.state.timestamp.copy()
        values: dict[str, Any] = {name: detached_copy(value) for name, value in metrics.items()}
        for name, value in values.items():
            self.data.setdefault(name, []).append((now, value))
            self.most_recent_timestamps[name] = now
        self.most_recent_values.update(values)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Keep the table as JSON."""
        self.tables[name] = table_as_json(columns, rows)

    def get_timeseries(self, metric: str) -> "dict[str, NDArray[Any]]":
        """Return the values of one metric, and beside them each field of their timestamps.

        Args:
            metric: Its name.

        Returns:
            Arrays of one length, the values under the metric's name; durations are in seconds.

        Raises:
            ValueError: If it has not been logged.
        """
        import numpy as np  # here, since nothing else of this module needs it

        if metric not in self.data:
            raise ValueError(f"metric={metric!r} has not been logged. Logged were: {', '.join(self.data) or 'none'}.")
        series: dict[str, list[Any]] = {}
        for stamp, value in self.data[metric]:
            for name, field in {metric: value, **stamp.state_dict()}.items():
                number: Any = field.total_seconds() if isinstance(field, datetime.timedelta) else field
                series.setdefault(name, []).append(number.item() if hasattr(number, "item") else number)
        return {name: np.array(values) for name, values in series.items()}
