"""Logger destinations that need what was logged only now and then, and take it many calls at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias, TypeGuard
from weakref import WeakMethod

from composer_events.logger_destination import LoggerDestination
from composer_events.value_copies import UNCHANGING, as_of_now, kept_metrics

if TYPE_CHECKING:
    from composer_time import Timestamp

__all__ = ["BufferedDestination", "LoggedMetrics", "MetricBuffer"]

_MOST_KEPT: Final = 256  # calls; so that what nobody asks for does not grow
# Another thread that reads a destination hands over, too. One lock for all, since destinations are copied and pickled.
_HANDING_OVER: Final = RLock()
_are_unchanging: Final = UNCHANGING.issuperset

LoggedMetrics: TypeAlias = "tuple[dict[str, Any], dict[str, Any], Timestamp | None, int | None]"
"""What one call logged: the metrics as they were handed in; copies of them as they were then, for
`composer_events.value_copies.restored` to read, if a destination asks for copies, otherwise the same again; the time,
`None` where a destination was called by hand; and the step, where the caller gave one."""


_Noted: TypeAlias = "tuple[dict[str, Any] | Callable[..., dict[str, Any]], Any, Timestamp | None, int | None]"


class BufferedDestination(LoggerDestination):
    """Take metrics many calls at a time.

    A training step logs several times, to each destination, and what reads the values every so many batches or only
    at the end need not be called each time. Such a destination overrides `take_metrics`; the `Logger` notes what is
    logged, and hands it over when there is much of it or when the destination calls `catch_up`, which it does before it
    looks at what it has. One with another `log_metrics`, be it a subclass's or one that a test sets on it, is called
    each time, as any other. The engine has everything handed over before it closes a callback.

    Attributes:
        copies_values: Whether it needs values as they were when they were logged, though tensors may have changed.

    Example:
        >>> from types import SimpleNamespace
        >>> from composer_events import Logger
        >>> from composer_time import Timestamp
        >>> class Summary(BufferedDestination):
        ...     losses = ()
        ...     def take_metrics(self, logged):
        ...         self.losses = (*self.losses, *(metrics["loss"] for metrics, *_ in logged))
        ...     def epoch_end(self, state, logger):
        ...         self.catch_up()
        ...         print(self.losses)
        >>> state, summary = SimpleNamespace(timestamp=Timestamp()), Summary()
        >>> logger = Logger(state, summary)
        >>> logger.log_metrics({"loss": 0.5})
        >>> logger.log_metrics({"loss": 0.25})
        >>> summary.losses
        ()
        >>> summary.epoch_end(state, logger)
        (0.5, 0.25)
    """

    copies_values: ClassVar[bool] = False
    _buffers: tuple[MetricBuffer, ...] = ()  # of the loggers that write to it

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the loggers are told of another `log_metrics`, such as a test's."""
        if name != "log_metrics":
            super().__setattr__(name, value)
            return
        if value == BufferedDestination.log_metrics.__get__(self):  # as a test puts it back when it is over
            vars(self).pop(name, None)
        else:
            super().__setattr__(name, value)
        self._sort_anew()

    def __delattr__(self, name: str) -> None:
        """Delete an attribute; the loggers are told if it is `log_metrics`."""
        super().__delattr__(name)
        if name == "log_metrics":
            self._sort_anew()

    @abstractmethod
    def take_metrics(self, logged: Sequence[LoggedMetrics]) -> None:
        """Take what was logged since the last time.

        Args:
            logged: What each call logged, in order.
        """

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Take numbers measured at one step, at once.

        Args:
            metrics: By name.
            step: The count of batches that they belong to.
        """
        self.catch_up()
        copies = kept_metrics(metrics) if self.copies_values else metrics
        self.take_metrics([(metrics, copies, None, step)])

    def catch_up(self) -> None:
        """Have `take_metrics` called with what was logged and not yet handed over."""
        for buffer in self._buffers:
            buffer.deliver()

    def attach(self, buffer: MetricBuffer) -> None:
        """Remember whom to ask in `catch_up`; for a `Logger` to call."""
        if buffer not in self._buffers:
            self._buffers = (*self._buffers, buffer)

    def _sort_anew(self) -> None:
        for buffer in self._buffers:
            buffer.sort_anew()


class MetricBuffer:
    """What was logged and not yet handed to the destinations that take it late.

    Args:
        sort_anew: A method, called when a destination's `log_metrics` is replaced. It keeps nobody alive.

    Attributes:
        destinations: Those. Assigning others hands over to the old ones first.
    """

    def __init__(self, sort_anew: Callable[[], None]) -> None:
        self._sort_anew: WeakMethod[Callable[[], None]] | None = WeakMethod(sort_anew)
        # Of what is computed when it is handed over, the call stands in the place of the metrics.
        self._noted: list[_Noted] = []
        self._destinations: tuple[BufferedDestination, ...] = ()
        self._copies = False
        self._seen: Timestamp | None = None
        self._now: Timestamp | None = None  # a copy of the one seen, which loading a state changes in place
        self._batch = -1  # of the copy

    @property
    def destinations(self) -> tuple[BufferedDestination, ...]:
        """Who takes what is noted."""
        return self._destinations

    @destinations.setter
    def destinations(self, destinations: tuple[BufferedDestination, ...]) -> None:
        try:
            self.deliver()
        finally:  # an old one that fails does not keep out the new ones
            self._destinations = destinations
            self._copies = any(place.copies_values for place in destinations)
            for place in destinations:
                place.attach(self)

    def sort_anew(self) -> None:
        """Have the logger find out anew which of its destinations take metrics late."""
        sort = None if self._sort_anew is None else self._sort_anew()
        if sort is not None:
            sort()

    def note(self, metrics: dict[str, Any], timestamp: Timestamp, step: int | None) -> None:
        """Keep what one call logs until it is handed over.

        Args:
            metrics: By name.
            timestamp: The time in training.
            step: The count of batches, if the caller gave one.
        """
        if timestamp is not self._seen or timestamp.num_batches != self._batch:
            self._look_at(timestamp)
        self._noted.append((*_as_of_now(metrics, self._copies), self._now, step))
        if len(self._noted) >= _MOST_KEPT:
            self.deliver()

    def note_call(self, compute: Callable[..., dict[str, Any]], arguments: Sequence[Any], timestamp: Timestamp) -> None:
        """Keep a call whose result is to be logged, until it is handed over.

        Args:
            compute: Takes the timestamp and the arguments, and returns metrics by name, in a dict of their own.
            arguments: What it takes, which does not change any more.
            timestamp: The time in training.
        """
        if timestamp is not self._seen or timestamp.num_batches != self._batch:
            self._look_at(timestamp)
        self._noted.append((compute, arguments, self._now, None))
        if len(self._noted) >= _MOST_KEPT:
            self.deliver()

    def deliver(self) -> None:
        """Hand over what was noted, to all destinations."""
        if not self._noted:
            return
        with _HANDING_OVER, ExitStack() as rest:  # one that fails costs the others nothing
            noted = self._noted[:]
            del self._noted[: len(noted)]  # another thread may go on adding to the list
            if logged := self._computed(noted, rest):
                for place in reversed(self._destinations):
                    rest.callback(_hand_to, place, logged)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the logger, to which a copy does not belong: nobody copies a whole run with a destination."""
        return {**vars(self), "_sort_anew": None}

    def _look_at(self, timestamp: Timestamp) -> None:
        self._seen, self._now, self._batch = timestamp, timestamp.copy(), timestamp.num_batches

    def _computed(self, noted: Sequence[_Noted], rest: ExitStack) -> list[LoggedMetrics]:
        """Return what was noted with the results of calls; what one of them raises is raised at the end."""
        logged: list[LoggedMetrics] = []
        for kept, copies, now, step in noted:
            if not callable(kept):
                logged.append((kept, copies, now, step))
                continue
            try:
                metrics = kept(now, *copies)
            except BaseException as error:  # Ctrl-C, too, is raised once all have what is theirs
                name = getattr(kept, "__qualname__", type(kept).__qualname__)
                batch = None if now is None else now.num_batches
                error.add_note(f"It was raised by {name}, which computes what was logged at batch {batch}.")
                rest.callback(_raise, error)
                continue
            if metrics:
                logged.append((*_as_of_now(metrics, self._copies), now, step))
        return logged


def _as_of_now(metrics: dict[str, Any], copies: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    if _are_unchanging(map(type, metrics.values())):  # most are
        return (same := dict(metrics)), same
    return as_of_now(metrics, copies)


def _raise(error: BaseException) -> None:
    raise error


def _hand_to(place: BufferedDestination, logged: Sequence[LoggedMetrics]) -> None:
    try:
        place.take_metrics(logged)
    except Exception as error:
        # The engine adds next what was running: whatever had metrics handed over, often to all but itself.
        now = logged[-1][2]
        error.add_note(
            f"The destination {type(place).__name__} raised it while it took metrics that were logged up to batch "
            f"{None if now is None else now.num_batches}. What else is named here may only have asked for them."
        )
        raise


def takes_late(place: object) -> TypeGuard[BufferedDestination]:
    """Answer whether a destination takes metrics late: it is made for that, and nobody has put another way on it."""
    return (
        isinstance(place, BufferedDestination)
        and type(place).log_metrics is BufferedDestination.log_metrics
        and "log_metrics" not in vars(place)
    )
