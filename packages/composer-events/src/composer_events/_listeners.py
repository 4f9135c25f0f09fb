"""Which callbacks listen to which event."""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Final

from composer_events._data_source import DataSource
from composer_events._overrides import overrides
from composer_events._watched_list import WatchedList
from composer_events.callback import Callback
from composer_events.event import Event
from composer_events.logger_destination import LoggerDestination

if TYPE_CHECKING:
    from collections.abc import Iterable

    from composer_events.state import State

# A method that was set on a callback itself, not on its class, is noticed before and after these at the latest.
ENTRANCES: Final = frozenset({Event.INIT, Event.FIT_START, Event.EVAL_STANDALONE_START, Event.PREDICT_START})


class Listeners:
    """A table of the callbacks that each event has to call, for the callbacks of a state as they are now.

    Attributes:
        watched_state: The state, if it is a `State`, whose lists count their changes and are the same lists for life,
            else `None`.
        callbacks: The state's callbacks.
        version: The count of changes of `callbacks` for which the table holds.
        algorithms: The state's algorithms.
        by_event: For each event with listeners the ones to call, logger destinations last. The events that begin
            something are always in it.
        calls: The same with the name of the method to call, `None` where it is `run_event` that has to be asked.
    """

    __slots__ = ("_snapshot", "algorithms", "by_event", "callbacks", "calls", "version", "watched_state")

    def __init__(self, state: State) -> None:
        self.callbacks, self.algorithms = state.callbacks, state.algorithms
        lists: list[object] = [self.callbacks, self.algorithms]
        is_state = isinstance(state, DataSource)  # pyright: ignore[reportUnnecessaryIsInstance]  # any object may be one
        is_watched = is_state and all(isinstance(hooks, WatchedList) for hooks in lists)
        self.watched_state = state if is_watched else None
        self.version = self.callbacks.version if is_watched else -1
        self._snapshot = tuple(self.callbacks)
        ordered = sorted(self._snapshot, key=lambda callback: isinstance(callback, LoggerDestination))
        called = {event: tuple(listening(ordered, event)) for event in Event}
        self.by_event = {event: found for event, found in called.items() if found or event in ENTRANCES}
        asked = frozenset(id(callback) for callback in ordered if overrides(callback, Callback, "run_event"))
        self.calls = {
            event: tuple((callback, None if id(callback) in asked else event.value) for callback in callbacks)
            for event, callbacks in self.by_event.items()
        }

    def is_current(self, state: State, event: Event) -> bool:
        """Answer whether the table still holds for this state at this event."""
        if event in ENTRANCES:
            return False
        if state is self.watched_state:
            return self.callbacks.version == self.version
        # A plain list does not tell when it changes. Equal is not enough: equal callbacks may differ.
        callbacks = state.callbacks
        return len(callbacks) == len(self._snapshot) and all(map(is_, callbacks, self._snapshot))


def listening(callbacks: Iterable[Callback], event: Event) -> list[Callback]:
    """Return those for which the event can have an effect."""
    return [
        callback
        for callback in callbacks
        if overrides(callback, Callback, "run_event") or overrides(callback, Callback, event.value)
    ]
