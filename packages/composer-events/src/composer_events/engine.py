"""Engine that runs the matching algorithms and the listening callbacks at each event."""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Final, TypeAlias

from composer_events._hooks import (
    Closer,
    Observer,
    check_requirements,
    explain_failure,
    is_closing,
    mark_in_use,
    parse_passes,
)
from composer_events._lists import VersionedList
from composer_events._state_dict import DataSource
from composer_events.algorithm import Algorithm
from composer_events.arguments import overrides
from composer_events.batches import ensure_tuple
from composer_events.callback import Callback
from composer_events.event import Event
from composer_events.explanation import explain, log_explanation
from composer_events.logger import Logger
from composer_events.logger_destination import LoggerDestination
from composer_events.passes import DEFAULT_PASSES, AlgorithmPass
from composer_events.state import InputsTargetsMixin, State

if TYPE_CHECKING:
    from composer_events.explanation import Explanation

__all__ = ["Engine", "Trace", "Traces", "is_closing"]


@dataclass(slots=True)
class Trace:
    """Record of one algorithm's run on one event.

    Attributes:
        name: Class name of the algorithm.
        event: The event.
        exit_code: Return value of `apply`.
        order: Position among the algorithms of the event, from 0.
        run: Whether it ran.
    """

    name: str = ""
    event: Event | None = None
    exit_code: int | None = None
    order: int | None = None
    run: bool = False


Traces: TypeAlias = OrderedDict[str, Trace]
"""Traces of the algorithms that ran on an event, in order, by `'<algorithm>/<event>'`."""


class Engine:
    """Runs algorithms and callbacks at the events of a training loop.

    On `Event.INIT` logger destinations act first, then the other callbacks, then algorithms. On every other event
    algorithms act first, then callbacks, then logger destinations. The callbacks that listen to an event are
    determined when the list of callbacks changes, so over a `State` an event without listeners costs a look-up.

    An exception of an algorithm or a callback ends the event and propagates unchanged, with a note that names the hook
    and the time.

    Args:
        state: The training state. Any object with `algorithms`, `callbacks` (lists), `timestamp`, `dataloader` and
            `max_duration` is accepted.
        logger: Passed to algorithms and callbacks. By default a logger for the logger destinations among the callbacks.
        algorithm_passes: Functions of `(algorithms, event)` that order the matched algorithms, in addition to the
            default ones: a pass, a pass with the index at which it is inserted, such as `(f, 0)`, or a list of these.
        algorithms: Appended to `state.algorithms`. An older form, which warns.

    Attributes:
        state: The training state.
        logger: The logger.
        algorithm_passes: The passes in the order in which they are applied.

    Raises:
        ValueError: If `algorithm_passes` has another form.

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
            warnings.warn(
                "Engine(state, algorithms=...) is an older spelling, kept until 1.0. Put the algorithms in the state "
                "instead: `State(..., algorithms=...)` or `state.algorithms.append(...)`.",
                DeprecationWarning,
                stacklevel=2,
            )
            state.algorithms.extend(ensure_tuple(algorithms))
        if logger is None:
            logger = Logger(state, [place for place in state.callbacks if isinstance(place, LoggerDestination)])
        self.logger = logger
        self._observer = Observer()
        self._default_passes = list(DEFAULT_PASSES)
        # Positions by event, classes, and which algorithms blend the loss, which is all that the default passes ask.
        self._orders: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._listeners = Listeners(state)
        self._closer = Closer(state, logger)
        self._has_begun = False

    def register_pass(self, algorithm_pass: AlgorithmPass, index: int = -1) -> None:
        """Add a pass.

        Args:
            algorithm_pass: A function of `(algorithms, event)` that returns the algorithms to run, in order.
            index: Position in `algorithm_passes`; -1 appends.
        """
        if index == -1:
            self.algorithm_passes.append(algorithm_pass)
        else:
            self.algorithm_passes.insert(index, algorithm_pass)

    def run_event(self, event: Event | str) -> Traces:
        """Run the algorithms that match and the callbacks that listen to an event.

        Args:
            event: The event, or its name.

        Returns:
            The traces of the algorithms that ran, in order. Empty if none did.

        Raises:
            ValueError: If no event has that name.
            RuntimeError: If the engine is closed, or on `Event.INIT` if a callback is already in use.
            AssertionError: If the state lacks the dataloader or the duration that the event requires.
        """
        if not isinstance(event, Event):
            event = Event(event)
        state, listeners = self.state, self._listeners
        # Runs many times per batch, mostly without algorithms, a profiler or many listeners. A watched state is a
        # State: reading its private attributes avoids properties, which would double the time.
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
            calls = listeners.plain_calls.get(event, _NO_CALLS)
            if calls is _NO_CALLS:
                return OrderedDict()
            if calls is not None:
                # Counted, so that State can distinguish assignments in hooks from those in the loop.
                state.num_running_events += 1
                try:
                    self._run_callbacks(calls, event)
                finally:
                    state.num_running_events -= 1
                return OrderedDict()
        if not isinstance(state, InputsTargetsMixin):  # pyright: ignore[reportUnnecessaryIsInstance]  # any object may be one
            return self._run(event)
        state.num_running_events += 1
        try:
            return self._run(event)
        finally:
            state.num_running_events -= 1

    def run_marker_only_event(self, event: Event | str) -> None:
        """Mark an event for the profiler without running hooks, to end a pair whose second event does not occur.

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
        """Describe which algorithm acts on which event, in which order and why, and which algorithms conflict.

        The order on an event results from the passes over all algorithms that declare in `Algorithm.acts_on` that they
        may act on it; `match` decides whether one really does. If a class declares nothing, `match` of a copy of the
        algorithm is called in the current state.

        On `Event.INIT` the same, but without calling `match`, is logged to `composer.core.engine`: the table at level
        INFO, conflicts at WARNING. It is not updated later.

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
        """Return whether the engine is closed and runs no more events."""
        return self._closer.is_closed

    def close(self) -> None:
        """Call `close` and then `post_close` of every callback. Further calls do nothing.

        Errors of callbacks are logged and not raised, so that all callbacks are closed; `post_close` is skipped if
        `close` failed. A `KeyboardInterrupt` is raised after all were closed. The persistent workers of all
        dataloaders, including those of evaluators, are stopped.
        """
        self._closer.close()

    @property
    def _close(self) -> Callable[[], None]:
        """Function registered with `atexit`; published scripts unregister `engine._close` after each run."""
        return self._closer.close

    def __del__(self) -> None:
        closer = getattr(self, "_closer", None)  # missing if the constructor failed
        # At interpreter shutdown modules are partly gone, and the `atexit` hook has already closed everything.
        if closer is not None and not sys.is_finalizing():
            closer.close()

    def _run(self, event: Event) -> Traces:
        self._refuse_if_closed(event)
        state, observer = self.state, self._observer
        traces: Traces = OrderedDict()
        is_observed = observer.is_needed(state)
        if is_observed:
            observer.finish_marker(event, state)
            observer.write(event, state, "event")
        if state.dataloader is None or state.max_duration is None:
            check_requirements(event, state)
        is_entrance = event in ENTRANCES
        if event is _INIT:
            traces = self._run_init(event, is_observed)
        else:
            if state.algorithms:
                traces = self._run_algorithms(event, is_observed)
            if is_entrance or not self._listeners.is_current(state):
                self._listeners = Listeners(state)
            self._run_callbacks(self._listeners.calls.get(event, ()), event, is_observed)
        if is_entrance:
            # A hook may have set a method on a callback object, which does not change the version of the list.
            self._listeners = Listeners(state)
        if is_observed:
            observer.start_marker(event, state)
        return traces

    def _run_init(self, event: Event, is_observed: bool) -> Traces:
        state = self.state
        in_use: tuple[Callback, ...] = ()
        for loggers_act in (True, False):
            self._mark_in_use(in_use)
            in_use = tuple(state.callbacks)  # read again for each group, because a logger may add callbacks
            group = [callback for callback in in_use if isinstance(callback, LoggerDestination) is loggers_act]
            self._run_callbacks([(callback, None) for callback in listening(group, event)], event, is_observed)
        self._mark_in_use(in_use)
        if not state.algorithms:
            return OrderedDict()
        log_explanation(state, self.algorithm_passes)
        return self._run_algorithms(event, is_observed)

    def _run_algorithms(self, event: Event, is_observed: bool) -> Traces:
        state, logger = self.state, self.logger
        traces: Traces = OrderedDict()
        # Compared on each event, because the public list may be changed at any time.
        is_default = self.algorithm_passes == self._default_passes
        matched: Sequence[Algorithm] = []
        kind, hook = "algorithm", None
        try:
            # The variables `kind` and `hook` are what the note on an exception names.
            for hook in state.algorithms:
                if hook.match(event, state):  # every `match` before any algorithm acts
                    matched.append(hook)
            if not matched and is_default:  # a custom pass may add algorithms
                return traces
            kind = "pass"
            for hook in (self._in_default_order,) if is_default else self.algorithm_passes:
                matched = hook(matched, event)
                if not isinstance(matched, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]  # of the user
                    raise TypeError(
                        f"A pass returned {matched!r}, which is not a sequence of algorithms. It must return the "
                        f"algorithms to run, in order; a pass that changes nothing returns the list that it received."
                    )
            kind, event_name = "algorithm", str(event)
            for order, hook in enumerate(matched):
                # Not a `with` on a null context, which takes longer than an algorithm that does nothing.
                if is_observed:
                    with self._observer.marker(kind, hook, event, state):
                        exit_code = hook.apply(event, state, logger)
                else:
                    exit_code = hook.apply(event, state, logger)
                traces[f"{hook}/{event_name}"] = Trace(hook.__class__.__name__, event, exit_code, order, True)
        except Exception as error:
            explain_failure(error, kind, hook, event, state)
            raise
        # Loggers of other classes have no `takes`, so they get every trace.
        takes: Callable[[str], bool] = getattr(logger, "takes", bool)
        if traces and takes("log_traces"):
            logger.log_traces({f"algorithm_traces/{t.name}/{event_name}": int(t.run) for t in traces.values()})
        return traces

    def _in_default_order(self, matched: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
        """Apply the default passes, whose result is cached. They warn of blended losses the first time only."""
        if len(matched) < 2:
            return matched
        key = (
            event,
            *[algorithm.__class__ for algorithm in matched],
            *[bool(getattr(algorithm, "interpolate_loss", False)) for algorithm in matched],
        )
        order = self._orders.get(key)
        if order is None:
            if len(self._orders) >= _MAX_KEPT:  # algorithms that match at random have many combinations
                self._orders.clear()
            order = self._orders[key] = _positions(matched, event)
        return [matched[position] for position in order]

    def _run_callbacks(self, calls: Iterable[Call], event: Event, is_observed: bool = False) -> None:
        state, logger = self.state, self.logger
        callback: Callback | None = None
        try:
            if is_observed:
                for callback, _ in calls:
                    with self._observer.marker("callback", callback, event, state):
                        callback.run_event(event, state, logger)
                return
            for callback, method in calls:
                if method is None:
                    callback.run_event(event, state, logger)
                else:
                    getattr(callback, method)(state, logger)
        except Exception as error:
            explain_failure(error, "callback", callback, event, state)
            raise

    def _mark_in_use(self, before: Sequence[Callback]) -> None:
        added = [callback for callback in self.state.callbacks if not any(callback is one for one in before)]
        try:
            mark_in_use(added, self._closer)
        except RuntimeError:
            # The callbacks belong to another engine, so this one must not close them, unless an earlier INIT of this
            # engine has marked them.
            if not self._has_begun:
                self._closer.stand_down()
            raise
        self._has_begun = True

    def _refuse_if_closed(self, event: Event) -> None:
        if self._closer.is_closed:
            raise RuntimeError(
                f"The engine was already closed and therefore cannot run {event}. Create a new Trainer (or Engine) to "
                f"continue; a closed one, or one whose callbacks a later Trainer has taken, has released the files and "
                f"connections of its loggers."
            )


_MAX_KEPT: Final = 256


def _positions(matched: Sequence[Algorithm], event: Event) -> tuple[int, ...]:
    ordered = matched
    for default_pass in DEFAULT_PASSES:
        ordered = default_pass(ordered, event)
    # By id, because algorithms need not be hashable, and different ones may compare equal.
    place = {id(algorithm): position for position, algorithm in enumerate(matched)}
    return tuple(place[id(algorithm)] for algorithm in ordered)


Call: TypeAlias = tuple[Callback, str | None]
_NO_CALLS: Final[tuple[Call, ...]] = ()
_INIT: Final = Event.INIT  # attribute access on an Enum class runs Python code in Python 3.11

# At these events the table is rebuilt, to find methods that were set on a callback object instead of its class.
ENTRANCES: Final = frozenset({Event.INIT, Event.FIT_START, Event.EVAL_STANDALONE_START, Event.PREDICT_START})


class Listeners:
    """Table of the callbacks to call at each event, for the current callbacks of a state.

    Attributes:
        watched_state: The state if it is a `State`, whose lists count their changes and keep their identity, else
            `None`.
        callbacks: The state's callbacks.
        version: The version of `callbacks` for which the table is valid.
        algorithms: The state's algorithms.
        calls: The callbacks to call at each event that has any, logger destinations last, each with the name of its
            method, or `None` to call `run_event`.
        plain_calls: The same, with `None` for the events at which the table is rebuilt.
    """

    __slots__ = ("_snapshot", "algorithms", "callbacks", "calls", "plain_calls", "version", "watched_state")

    def __init__(self, state: State) -> None:
        self.callbacks, self.algorithms = state.callbacks, state.algorithms
        lists: list[object] = [self.callbacks, self.algorithms]
        is_state = isinstance(state, DataSource)  # pyright: ignore[reportUnnecessaryIsInstance]  # any object may be one
        is_watched = is_state and all(isinstance(hooks, VersionedList) for hooks in lists)
        self.watched_state = state if is_watched else None
        self.version = self.callbacks.version if is_watched else -1
        self._snapshot = tuple(self.callbacks)
        # Logger destinations last, so that they can write what the other callbacks log. The sort is stable.
        ordered = sorted(self._snapshot, key=lambda callback: isinstance(callback, LoggerDestination))
        # Call an overridden `run_event` instead of the method of the event.
        asked = frozenset(id(callback) for callback in ordered if overrides(callback, Callback, "run_event"))
        self.calls: dict[Event, tuple[Call, ...]] = {}
        for event in Event:
            calls = tuple((c, None if id(c) in asked else event.value) for c in listening(ordered, event))
            if calls:
                self.calls[event] = calls
        self.plain_calls: dict[Event, tuple[Call, ...] | None] = {**self.calls, **dict.fromkeys(ENTRANCES)}

    def is_current(self, state: State) -> bool:
        """Return whether the table is valid for this state."""
        if state is self.watched_state:
            return self.callbacks.version == self.version
        # A plain list has no version. Compare by identity, because equal callbacks may be different objects.
        callbacks = state.callbacks
        return len(callbacks) == len(self._snapshot) and all(map(is_, callbacks, self._snapshot))


def listening(callbacks: Iterable[Callback], event: Event) -> list[Callback]:
    """Return the callbacks that override the event's method or `run_event`."""
    return [
        callback
        for callback in callbacks
        if overrides(callback, Callback, "run_event") or overrides(callback, Callback, event.value)
    ]
