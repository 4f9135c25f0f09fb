"""Everything that was logged, kept in memory."""

import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from composer.loggers._snapshot import UNCHANGING, detached_copy
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
        hyperparameters: The settings of the run.
        tables: The tables by name, as JSON.
        state: The training state, from INIT on.
    """

    def __init__(self) -> None:
        self._data: dict[str, list[tuple[Timestamp, Any]]] = {}
        # As they came. They are sorted by metric when somebody looks, and training need not wait for that.
        self._unsorted: list[tuple[Timestamp, dict[str, Any]]] = []
        self._seen: Timestamp | None = None
        self._now = Timestamp()  # a copy of the one seen
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
        stamp = self.state.timestamp
        if stamp is not self._seen:
            self._seen, self._now = stamp, stamp.copy()
        self._unsorted.append((self._now, _kept_values(metrics)))

    @property
    def data(self) -> dict[str, list[tuple[Timestamp, Any]]]:
        """For each metric, its values with the timestamps."""
        for now, values in self._unsorted:
            for name, value in values.items():
                restored = value.restore() if type(value) is _Scalar else value
                self._data.setdefault(name, []).append((now, restored))
        self._unsorted.clear()
        return self._data

    @property
    def most_recent_values(self) -> dict[str, Any]:
        """The latest value of each metric."""
        return {name: entries[-1][1] for name, entries in self.data.items()}

    @property
    def most_recent_timestamps(self) -> dict[str, Timestamp]:
        """When that was."""
        return {name: entries[-1][0] for name, entries in self.data.items()}

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


class _Scalar(NamedTuple):
    """A tensor of one number: reading the number takes a third of the time of copying the tensor."""

    number: float | int | bool | complex
    dtype: torch.dtype

    def restore(self) -> torch.Tensor:
        return torch.tensor(self.number, dtype=self.dtype, device="cpu")


def _kept_values(values: dict[str, Any]) -> dict[str, Any]:
    if UNCHANGING.issuperset(map(type, values.values())):  # most are, and this looks at all of them at once
        return dict(values)
    return {name: _kept(value) for name, value in values.items()}


def _kept(value: Any) -> Any:
    """Return a value as it is now; whatever lies on an accelerator stays there, and nobody waits for it."""
    if type(value) is torch.Tensor and value.is_cpu and value.ndim == 0 and not value.is_quantized:
        return _Scalar(value.item(), value.dtype)
    return detached_copy(value)
