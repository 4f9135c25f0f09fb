"""The engine: at each event it runs the algorithms that match and the callbacks that listen."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from composer_events._hooks import (
    Closer,
    Observer,
    adopt_algorithms,
    blame,
    call_hook,
    check_requirements,
    claim,
    claim_added,
    is_closing,
    method_of,
    parse_passes,
)
from composer_events._lists import WatchedList
from composer_events._state_dict import DataSource
from composer_events.algorithm import Algorithm
from composer_events.arguments import overrides
from composer_events.callback import Callback
from composer_events.event import Event
from composer_events.explanation import explain, log_explanation
from composer_events.logger import Logger
from composer_events.logger_destination import LoggerDestination
from composer_events.passes import DEFAULT_PASSES, AlgorithmPass
from composer_events.state import BatchInParts, State

if TYPE_CHECKING:
    from composer_events.explanation import Explanation

__all__ = ["Engine", "Trace", "Traces", "is_closing"]


@dataclass(slots=True)
class Trace:
    """What one algorithm did on one event.

    Attributes:
        name: Its class.
        event: The event.
        exit_code: What its `apply` returned.
        order: Its place among the algorithms of the event, from 0.
        run: Whether it ran.
    """

    name: str = ""
    event: Event | None = None
    exit_code: int | None = None
    order: int | None = None
    run: bool = False


Traces: TypeAlias = OrderedDict[str, Trace]
"""What the algorithms did on an event, in the order in which they ran, by `'<algorithm>/<event>'`."""


class Engine:
    """Run algorithms and callbacks at the events of a training loop.

    On `Event.INIT` logger destinations act first, then the other callbacks, then algorithms. On every other event
    algorithms act first, then callbacks, then logger destinations. Which callback listens to which event is worked
    out when the list of callbacks changes, so over a `State` an event without listeners costs a look-up.

    An exception of an algorithm or a callback ends the event and reaches the caller as it is, with a note about who
    raised it and when.

    Args:
        state: The training state. Any object will do that has `algorithms`, `callbacks` (lists), `timestamp`,
            `dataloader` and `max_duration`.
        logger: Passed to algorithms and callbacks. By default one over the logger destinations among the callbacks.
        algorithm_passes: Functions of `(algorithms, event)` that order the matched algorithms, besides the default
            ones: a pass, a pass with the index at which it is inserted, such as `(f, 0)`, or a list of these.
        algorithms: Appended to `state.algorithms`, which is where they belong. An older spelling, which warns.

    Attributes:
        state: The training state.
        logger: The logger.
        algorithm_passes: The passes in the order in which they are applied.

    Raises:
        ValueError: If `algorithm_passes` is none of the accepted kinds.

    Example:
        >>> from types import SimpleNamespace
        >>> from composer_time import Timestamp
        >>> from composer_events import Callback, Engine
        >>> class Greet(Callback):
        ...     def epoch_start(self, state, logger):
        ...         print(f"epoch {state.timestamp.epoch.value}")
        >>> state = SimpleNamespace(
        ...     algorithms=[], callbacks=[Greet()], timestamp=Timestamp(), dataloader=[1, 2], max_duration="1ep"
        ... )
        >>> engine = Engine(state)
        >>> engine.run_event("epoch_start")
        epoch 0
        OrderedDict()
        >>> engine.close()
    """

    def __init__(
        self,
        state: State,
        logger: Logger | None = None,
        algorithm_passes: AlgorithmPass
        | tuple[AlgorithmPass, int]
        | Sequence[AlgorithmPass | tuple[AlgorithmPass, int]]
        | None = None,
        *,
        algorithms: Algorithm | Sequence[Algorithm] | None = None,
    ) -> None:
        self.state = state
        self.algorithm_passes: list[AlgorithmPass] = list(DEFAULT_PASSES)
        for algorithm_pass, index in parse_passes(algorithm_passes):
            self.register_pass(algorithm_pass, index)
        if algorithms is not None:
            adopt_algorithms(state, algorithms)
        if logger is None:
            logger = Logger(state, [place for place in state.callbacks if isinstance(place, LoggerDestination)])
        self.logger = logger
        self._observer = Observer()
        self._default_passes = list(DEFAULT_PASSES)
        self._default_order = DefaultOrder()
        self._listeners = Listeners(state)
        self._closer = Closer(state, logger)
        self._has_begun = False

    def register_pass(self, algorithm_pass: AlgorithmPass, index: int = -1) -> None:
        """Add a pass.

        Args:
            algorithm_pass: A function of `(algorithms, event)` that returns the algorithms to run, in order.
            index: Its place in `algorithm_passes`; -1 is the end.
        """
        if index == -1:
            self.algorithm_passes.append(algorithm_pass)
        else:
            self.algorithm_passes.insert(index, algorithm_pass)

    def run_event(self, event: Event | str) -> Traces:
        """Run the algorithms that match and the callbacks that listen.

        Args:
            event: The event, or its name.

        Returns:
            What each algorithm did, in the order in which they ran. Empty if none did.

        Raises:
            ValueError: If no event has that name.
            RuntimeError: If the engine is closed, or on `Event.INIT` if a callback is in use already.
            AssertionError: If the state lacks the dataloader or the duration that the event needs.
        """
        if not isinstance(event, Event):
            event = Event(event)
        state, listeners = self.state, self._listeners
        # The way of most events in most runs, taken many times for each batch: only callbacks want to know, or nobody.
        # A watched state is a State: what is read past its properties would otherwise take as long as all the rest.
        if (
            state is listeners.watched_state
            and listeners.callbacks.version == listeners.version
            and not listeners.algorithms
            and state._dataloader is not None  # pyright: ignore[reportPrivateUsage]
            and state._max_duration is not None  # pyright: ignore[reportPrivateUsage]
            and state.profiler is None
            and not self._observer.writes_debug_lines
            and not self._closer.is_closed
        ):
            calls = listeners.calls.get(event)
            if calls is None:
                return OrderedDict()
            if event not in ENTRANCES:
                self._call_methods(calls, event)
                return OrderedDict()
        if not isinstance(state, BatchInParts):  # pyright: ignore[reportUnnecessaryIsInstance]  # any object may be one
            return self._run(event)
        state.num_running_events += 1
        try:
            return self._run(event)
        finally:
            state.num_running_events -= 1

    def run_marker_only_event(self, event: Event | str) -> None:
        """Show an event to the profiler and run nothing, for a half of a pair that does not really happen.

        Args:
            event: The event, or its name.

        Raises:
            RuntimeError: If the engine is closed.
        """
        event = Event(event)
        self._refuse_if_closed(event)
        self._observer.finish_marker(event, self.state)
        self._observer.start_marker(event, self.state)

    def explain(self) -> Explanation:
        """Say which algorithm acts on which event, in which order and why, and which of them conflict.

        The order on an event is what the passes make of all algorithms that declare in `Algorithm.acts_on` that they
        may act on it; whether one really does is up to its `match`. Where a class declares nothing, `match` of a copy
        of the algorithm is asked how it would answer now.

        On `Event.INIT` the same, but without asking, goes to the log `composer.core.engine`: the table at level INFO,
        conflicts at WARNING. It is not kept up later.

        Returns:
            The turns and the conflicts as data; `print` shows them as a table.

        Example:
            >>> from types import SimpleNamespace
            >>> from composer_events import Algorithm, Engine, Event
            >>> class Convert(Algorithm):
            ...     acts_on, surgery_rank = {Event.INIT}, 6
            ...     def match(self, event, state):
            ...         return event is Event.INIT
            ...     def apply(self, event, state, logger): ...
            >>> class Replace(Convert):
            ...     surgery_rank = 2
            >>> engine = Engine(SimpleNamespace(algorithms=[Convert(), Replace()], callbacks=[]))
            >>> print(engine.explain())
            event  turn  algorithm  listed  why
            INIT   1     Replace    2       sort_by_surgery_rank: before Convert (2 < 6)
                   2     Convert    1
            <BLANKLINE>
            What the passes do:
              sort_by_surgery_rank: On `Event.INIT`, where models are rebuilt, sort by `Algorithm.surgery_rank`.
            >>> engine.close()
        """
        return explain(self.state, self.algorithm_passes)

    @property
    def is_closed(self) -> bool:
        """Answer whether the engine runs no more events."""
        return self._closer.is_closed

    def close(self) -> None:
        """Call `close` and then `post_close` of every callback. The second time it does nothing.

        Errors of callbacks are logged and not raised, so that each gets its turn; one whose `close` failed gets no
        `post_close`. A `KeyboardInterrupt` is raised once all had theirs. The persistent workers of the dataloaders,
        evaluators' included, are ended.
        """
        self._closer.close()

    @property
    def _close(self) -> Callable[[], None]:
        """The function registered with `atexit`; published scripts unregister `engine._close` after each run."""
        return self._closer.close

    def __del__(self) -> None:
        closer = getattr(self, "_closer", None)  # the constructor may have failed before
        # While the interpreter ends, modules are half gone, and the hook at its exit has closed everything before.
        if closer is not None and not sys.is_finalizing():
            closer.close()

    def _run(self, event: Event) -> Traces:
        self._refuse_if_closed(event)
        state, observer = self.state, self._observer
        is_observed = observer.is_needed(state)
        if is_observed:
            observer.finish_marker(event, state)
            observer.write(event, state, "event")
        if state.dataloader is None or state.max_duration is None:
            check_requirements(event, state)
        if event is Event.INIT:
            traces = self._run_init(event, is_observed)
        else:
            traces = self._run_algorithms(event, is_observed)
            self._run_callbacks(self._listeners_to(event), event, is_observed)
        if event in ENTRANCES:
            # A hook may just have set a method on a callback, which no list tells.
            self._listeners = Listeners(self.state)
        if is_observed:
            observer.start_marker(event, state)
        return traces

    def _run_init(self, event: Event, is_observed: bool) -> Traces:
        self._claim_callbacks()
        claimed = tuple(self.state.callbacks)
        for loggers_act in (True, False):
            # Looked up for each group, because a logger may bring callbacks with it.
            group = [c for c in self.state.callbacks if isinstance(c, LoggerDestination) is loggers_act]
            self._run_callbacks(listening(group, event), event, is_observed)
            claimed = claim_added(self.state.callbacks, claimed, self._closer)
        if self.state.algorithms:
            log_explanation(self.state, self.algorithm_passes)
        return self._run_algorithms(event, is_observed)

    def _run_algorithms(self, event: Event, is_observed: bool) -> Traces:
        traces: Traces = OrderedDict()
        if not self.state.algorithms:
            return traces
        matched = self._matching(event)
        if not matched and self.algorithm_passes == self._default_passes:  # a pass of the user's own may add algorithms
            return traces
        call = self._observer.call if is_observed else call_hook
        event_name = str(event)
        for order, algorithm in enumerate(self._in_order(matched, event)):
            exit_code = call("algorithm", algorithm, "apply", event, self.state, self.logger)
            traces[f"{algorithm}/{event_name}"] = Trace(algorithm.__class__.__name__, event, exit_code, order, True)
        if traces and _takes_traces(self.logger):
            self.logger.log_traces({f"algorithm_traces/{t.name}/{event_name}": int(t.run) for t in traces.values()})
        return traces

    def _matching(self, event: Event) -> Sequence[Algorithm]:
        """Ask every algorithm once, before any of them acts."""
        matched: list[Algorithm] = []
        for algorithm in self.state.algorithms:
            try:
                if method_of("algorithm", algorithm, "match")(event, self.state):
                    matched.append(algorithm)
            except Exception as error:
                blame(error, "algorithm", algorithm, event, self.state)
                raise
        return matched

    def _in_order(self, matched: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
        is_default = self.algorithm_passes == self._default_passes
        for algorithm_pass in (self._default_order,) if is_default else self.algorithm_passes:
            try:
                matched = _checked_order(algorithm_pass(matched, event))
            except Exception as error:
                blame(error, "pass", algorithm_pass, event, self.state)
                raise
        return matched

    def _run_callbacks(self, callbacks: Iterable[Callback], event: Event, is_observed: bool) -> None:
        call = self._observer.call if is_observed else call_hook
        for callback in callbacks:
            call("callback", callback, "run_event", event, self.state, self.logger)

    def _call_methods(self, calls: Iterable[tuple[Callback, str | None]], event: Event) -> None:
        """Do as `_run_callbacks` for a `State`, the shortest way: callbacks of a batch are many, each does little."""
        state, logger = self.state, self.logger
        callback: Callback | None = None
        state.num_running_events += 1
        try:
            for callback, method in calls:
                if method is None:
                    method_of("callback", callback, "run_event")(event, state, logger)
                else:
                    getattr(callback, method)(state, logger)
        except Exception as error:
            blame(error, "callback", callback, event, state)
            raise
        finally:
            state.num_running_events -= 1

    def _listeners_to(self, event: Event) -> Sequence[Callback]:
        if not self._listeners.is_current(self.state, event):
            self._listeners = Listeners(self.state)
        return self._listeners.by_event.get(event, ())

    def _claim_callbacks(self) -> None:
        try:
            claim(self.state.callbacks, self._closer)
        except RuntimeError:
            # What a second engine would close is at work elsewhere. After a second INIT it is at work here.
            if not self._has_begun:
                self._closer.stand_down()
            raise
        self._has_begun = True

    def _refuse_if_closed(self, event: Event) -> None:
        if self._closer.is_closed:
            raise RuntimeError(
                f"The engine was already closed and therefore cannot run {event}. Make a new Trainer (or Engine) to "
                f"train on; a closed one, or one whose callbacks a later Trainer has taken, has given up its loggers' "
                f"files and connections."
            )


def _checked_order(ordered: object) -> Sequence[Algorithm]:
    if not isinstance(ordered, Sequence):
        raise TypeError(
            f"A pass returned {ordered!r}, which is no sequence of algorithms. It has to return those that are to act, "
            f"in order; one that changes nothing returns the list that it was given."
        )
    return cast("Sequence[Algorithm]", ordered)


def _takes_traces(logger: object) -> bool:
    # Only our own Logger can be asked; whatever else is used as one is simply told.
    return not isinstance(logger, Logger) or logger.takes("log_traces")


_MAX_KEPT: Final = 256


class DefaultOrder:
    """Apply the default passes, and remember how they moved things.

    They look at nothing but the event, the classes, and which algorithms blend the loss, so for the same ones the same
    moves are right again. The warning about blended losses is given when such a combination is first seen.
    """

    def __init__(self) -> None:
        self._orders: dict[tuple[object, ...], tuple[int, ...]] = {}

    def __call__(self, matched: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
        """Return the algorithms in the order in which they act."""
        if len(matched) < 2:
            return matched
        key = (
            event,
            *[algorithm.__class__ for algorithm in matched],
            *[bool(getattr(algorithm, "interpolate_loss", False)) for algorithm in matched],
        )
        order = self._orders.get(key)
        if order is None:
            order = _positions(matched, event)
            if len(self._orders) >= _MAX_KEPT:  # algorithms that match by chance would fill the memory
                self._orders.clear()
            self._orders[key] = order
        return [matched[position] for position in order]


def _positions(matched: Sequence[Algorithm], event: Event) -> tuple[int, ...]:
    ordered = matched
    for default_pass in DEFAULT_PASSES:
        ordered = default_pass(ordered, event)
    # By identity: algorithms need be neither hashable nor different from one another.
    place = {id(algorithm): position for position, algorithm in enumerate(matched)}
    return tuple(place[id(algorithm)] for algorithm in ordered)


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
