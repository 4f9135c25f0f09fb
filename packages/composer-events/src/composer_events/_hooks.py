"""Close callbacks exactly once, whether the user, the garbage collector or the interpreter's end asks for it."""

from __future__ import annotations

import atexit
import logging
import os
import warnings
import weakref
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from composer_events.batches import ensure_tuple
from composer_events.event import Event, ProfilerAction
from composer_events.logger import Logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from composer_events.algorithm import Algorithm
    from composer_events.callback import Callback
    from composer_events.passes import AlgorithmPass
    from composer_events.state import State
    from composer_time import Timestamp

# The name by which users filter it, whichever package the engine lives in.
_log = logging.getLogger("composer.core.engine")

_num_at_work = 0  # closers of this process


def is_closing() -> bool:
    """Answer whether callbacks of any engine are being closed at this moment, in whichever thread."""
    return _num_at_work > 0


class Closer:
    """Close the callbacks of one engine.

    The interpreter's exit holds this object, so it knows the state and the logger but not the engine: an engine that
    nobody uses any more can go, and closes as it goes.
    """

    def __init__(self, state: State, logger: Logger) -> None:
        self._state, self._logger = state, logger
        self.is_closed = False
        atexit.register(self.close)

    def is_done(self) -> bool:
        """Return whether the state has been trained to its end, and no event is running."""
        elapsed = getattr(self._state, "get_elapsed_duration", lambda: None)()
        return elapsed is not None and float(elapsed) >= 1 and self._state.num_running_events == 0

    def stand_down(self) -> None:
        """Count as closed from now on, and close nothing."""
        self.is_closed = True
        atexit.unregister(self.close)

    def close(self) -> None:
        """Call every callback's `close`, then `post_close` of those that closed well.

        Errors are only logged. A `KeyboardInterrupt` or a `SystemExit` is raised once everybody has had a turn.
        """
        if self.is_closed:
            return
        global _num_at_work
        _num_at_work += 1
        try:
            self._close()
        finally:
            _num_at_work -= 1

    def _close(self) -> None:
        self.stand_down()
        _log.debug("Closing the engine.")
        interrupts: list[BaseException] = []
        closed: list[Any] = []
        for callback in tuple(self._state.callbacks):
            name = type(callback).__name__
            _log.debug("Closing callback %s", name)
            _flush(self._logger, interrupts)
            try:
                callback.close(self._state, self._logger)
            except Exception:
                _log.exception("Error running %s.close(). Its post_close() is skipped.", name)
            except BaseException as interrupt:
                interrupts.append(interrupt)
            else:
                closed.append(callback)
        for callback in closed:
            name = type(callback).__name__
            _flush(self._logger, interrupts)
            _log.debug("Post-closing callback %s", name)
            try:
                callback.post_close()
            except Exception:
                _log.exception("Error running %s.post_close().", name)
            except BaseException as interrupt:
                interrupts.append(interrupt)
            else:
                release(callback)
        _flush(self._logger, interrupts)
        _shut_down_workers(self._state)
        _log.debug("Engine closed.")
        if interrupts:
            raise interrupts[0]


def _flush(logger: object, interrupts: list[BaseException]) -> None:
    """Hand over what was logged, also while a callback was closed: a destination that is closed asks no more."""
    if not isinstance(logger, Logger):  # only our own keeps anything
        return
    try:
        logger.flush()
    except Exception:
        _log.exception("Error handing over metrics while closing.")
    except BaseException as interrupt:
        interrupts.append(interrupt)


def _shut_down_workers(state: State) -> None:
    """End the dataloaders' persistent worker processes, which would otherwise outlive the training."""
    holders: list[Any] = [getattr(state, "train_dataloader", None), getattr(state, "dataloader", None)]
    holders += ensure_tuple(getattr(state, "evaluators", None))
    for loader in map(_innermost, holders):
        if not getattr(loader, "persistent_workers", False) or getattr(loader, "_iterator", None) is None:
            continue
        # torch has no public way to end them. Without its iterator the dataloader starts new ones when asked again.
        try:
            loader._iterator._shutdown_workers()
            loader._iterator = None
        except Exception as error:
            _log.debug("The workers of %s were left to end by themselves: %r", type(loader).__name__, error)


def _innermost(holder: Any) -> Any:
    """Take a dataloader out of the `DataSpec` and the `Evaluator` around it."""
    for _ in range(2):  # counted, since an object that answers every name, such as a mock, goes on for ever
        holder = getattr(holder, "dataloader", holder)
    return holder


def call_hook(kind: str, hook: object, method: str, event: Event, state: State, logger: Logger) -> Any:
    """Call a method of an algorithm or a callback, the hook, and return what it returns."""
    try:
        found = getattr(hook, method, None)
        if found is None or isinstance(hook, type):
            found = method_of(kind, hook, method)
        return found(event, state, logger)
    except Exception as error:
        blame(error, kind, hook, event, state)
        raise


def method_of(kind: str, hook: object, method: str) -> Callable[..., Any]:
    """Return the method by which an algorithm or a callback is called.

    Raises:
        TypeError: If the hook is a class, or has no such method.
    """
    found = getattr(hook, method, None)
    if found is not None and not isinstance(hook, type):
        return found
    hint = f"an object of a class that derives from {kind.capitalize()}"
    if isinstance(hook, type):
        hint = f"an object of that class: {hook.__name__}(...)"
    raise TypeError(f"state.{kind}s holds {hook!r}, which is no {kind} and has no {method}() to call. Put in {hint}.")


def blame(error: Exception, kind: str, hook: object, event: Event, state: State) -> None:
    """Add to an exception, whose type stays what it is, which hook or pass raised it and when."""
    when = ""
    with suppress(Exception):  # a state without a proper timestamp must not hide what went wrong
        when = f" (epoch {int(state.timestamp.epoch)}, batch {int(state.timestamp.batch)})"
    name = hook.__name__ if isinstance(hook, FunctionType) else type(hook).__name__
    error.add_note(f"raised by {kind} {name} on {event}{when}")


def adopt_algorithms(state: State, algorithms: Algorithm | Sequence[Algorithm]) -> None:
    """Append what was given to `Engine` as `algorithms` to the state's."""
    warnings.warn(
        "Engine(state, algorithms=...) is an older spelling, kept until 1.0. Put the algorithms in the state instead: "
        "`State(..., algorithms=...)` or `state.algorithms.append(...)`.",
        DeprecationWarning,
        stacklevel=3,
    )
    state.algorithms.extend(algorithms if isinstance(algorithms, Sequence) else [algorithms])


_RECORDED: Final = (ProfilerAction.ACTIVE, ProfilerAction.ACTIVE_AND_SAVE, ProfilerAction.WARMUP)
# These surround the batches, so the profiler may be skipping when they fire.
_ALSO_SKIPPED: Final = frozenset({Event.INIT, Event.FIT_START, Event.EPOCH_START, Event.EPOCH_END})


class Observer:
    """Time events and hooks with the profiler's markers, and write debug lines if `ENGINE_DEBUG` is set.

    The profiler is known by one method, `marker(name, actions=..., categories=...)`, whose result has `start()` and
    `finish()` and is a context manager.
    """

    def __init__(self) -> None:
        self.writes_debug_lines = bool(os.environ.get("ENGINE_DEBUG"))
        self._started: dict[str, Any] = {}

    def is_needed(self, state: State) -> bool:
        """Answer whether anybody observes."""
        return self.writes_debug_lines or getattr(state, "profiler", None) is not None

    def finish_marker(self, event: Event, state: State) -> None:
        """Stop the time of the pair of events that this one ends. One that never started has no time."""
        if getattr(state, "profiler", None) is None or not event.is_after_event:
            return
        marker = self._started.pop(event.canonical_name, None)
        if marker is not None:
            marker.finish()

    def start_marker(self, event: Event, state: State) -> None:
        """Start the time of the pair of events that this one begins."""
        profiler: Any = getattr(state, "profiler", None)
        if profiler is None or not event.is_before_event:
            return
        name = event.canonical_name
        if name in self._started:  # an exception kept the other event from happening
            self._started.pop(name).finish()
        actions = (*_RECORDED, ProfilerAction.SKIP) if event in _ALSO_SKIPPED else _RECORDED
        self._started[name] = profiler.marker(f"event/{name}", actions=actions)
        self._started[name].start()

    def write(self, event: Event, state: State, what: str) -> None:
        """Write a debug line, if they are wanted."""
        if self.writes_debug_lines:
            _log.debug("%s: Running %s", _log_prefix(event, state), what)

    def call(
        self,
        kind: str,
        hook: object,
        method: str,
        event: Event,
        state: State,
        logger: Logger,
    ) -> Any:
        """Call an algorithm or a callback where both can see it, and return what it returns."""
        name, profiler = hook.__class__.__name__, getattr(state, "profiler", None)
        self.write(event, state, f"{kind} {name}")
        marker = nullcontext()
        if profiler is not None:
            marker = profiler.marker(f"{kind}/{name}/event/{event.value}", categories=[event.value, name])
        with marker:
            return call_hook(kind, hook, method, event, state, logger)


def _log_prefix(event: Event, state: State) -> str:
    """Return the beginning of a debug line, such as `[ep=0][ba=12][event=BATCH_END]`."""
    stage = ""
    if event.is_eval or event.is_predict:
        kind = "eval" if event.is_eval else "predict"
        timestamp: Timestamp | None = getattr(state, f"{kind}_timestamp", None)  # a plain state need not count these
        stage = "" if timestamp is None else f"[{kind}_ba={int(timestamp.batch)}]"
    return f"[ep={int(state.timestamp.epoch)}][ba={int(state.timestamp.batch)}]{stage}[event={event.name}]"


# By id, because a callback need not be hashable; weakly, because one that is gone is in nobody's use.
_OPEN: Final[weakref.WeakValueDictionary[int, Callback]] = weakref.WeakValueDictionary()


class Holder(Protocol):
    """What closes the callbacks of an engine."""

    def is_done(self) -> bool:
        """Return whether training is over."""
        ...

    def close(self) -> None:
        """Close the callbacks."""
        ...


_HOLDERS: Final[weakref.WeakValueDictionary[int, Holder]] = weakref.WeakValueDictionary()


def claim(callbacks: Sequence[Callback], holder: Holder) -> None:
    """Mark callbacks as in use. One of an engine whose training is over is closed with that engine first.

    Raises:
        TypeError: If one of them is no callback.
        RuntimeError: If one of them is in use already. None is marked then.
    """
    for callback in callbacks:
        method_of("callback", callback, "run_event")
        before = _HOLDERS.get(id(callback))
        if _OPEN.get(id(callback)) is callback and before is not holder and before is not None and before.is_done():
            before.close()
        if _OPEN.get(id(callback)) is callback:
            raise RuntimeError(
                f"Cannot create a new trainer with an open callback or logger from a previous trainer: "
                f"{callback!r} ({type(callback).__name__}) is still in use, and that one has not trained to its end. "
                f"Call `trainer.close()` (or `engine.close()`) on the previous one first, or make a new "
                f"{type(callback).__name__}."
            )
    for callback in callbacks:
        _OPEN[id(callback)] = callback
        _HOLDERS[id(callback)] = holder


def claim_added(callbacks: Sequence[Callback], claimed: Sequence[Callback], holder: Holder) -> tuple[Callback, ...]:
    """Mark those as in use that have come since, and return all there are now.

    Raises:
        RuntimeError: If one of the new ones is in use already. None is marked then.
    """
    claim([callback for callback in callbacks if not any(callback is one for one in claimed)], holder)
    return tuple(callbacks)


def release(callback: Callback) -> None:
    """Mark a callback as free for another run."""
    _OPEN.pop(id(callback), None)


def parse_passes(passes: object) -> list[tuple[AlgorithmPass, int]]:
    """Turn what a user gives as `algorithm_passes` into passes and the places at which they are registered.

    Args:
        passes: `None`, a pass, a pass and its index as a tuple or a list of two, or a list of these. Index -1 means
            the end.

    Raises:
        ValueError: If it is anything else.
    """
    if passes is None:
        return []
    if isinstance(passes, list) and not _is_pass_with_index(cast(object, passes)):
        return [_parse_entry(entry) for entry in cast("list[object]", passes)]
    return [_parse_entry(cast(object, passes))]


def _parse_entry(entry: object) -> tuple[AlgorithmPass, int]:
    if callable(entry):
        return cast("AlgorithmPass", entry), -1
    if _is_pass_with_index(entry):
        return cast("tuple[AlgorithmPass, int]", tuple(cast("Sequence[Any]", entry)))
    raise ValueError(
        f"algorithm_passes holds {entry!r}, which is neither a pass, a function of (algorithms, event), nor a pass "
        f"with its index. Accepted: `f`, `(f, 0)`, or a list of these such as `[f, (g, 0)]`."
    )


def _is_pass_with_index(entry: object) -> bool:
    if not isinstance(entry, (tuple, list)):
        return False
    items = cast("Sequence[object]", entry)
    return len(items) == 2 and callable(items[0]) and isinstance(items[1], int)


_LOADING: Final = (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD)
_STANDALONE: Final = (Event.EVAL_STANDALONE_START, Event.EVAL_STANDALONE_END)

_WITHOUT_DATALOADER: Final = frozenset((*_LOADING, *_STANDALONE))
_WITHOUT_DURATION: Final = frozenset((*_LOADING, *(event for event in Event if event.is_eval or event.is_predict)))


def check_requirements(event: Event, state: State) -> None:
    """Refuse an event that the state is not ready for.

    Raises:
        AssertionError: If the dataloader or the duration is missing.
    """
    if state.dataloader is None and event not in _WITHOUT_DATALOADER:
        raise AssertionError(
            f"{event} fires while a dataloader is in use, but state.dataloader is None. Set one first, as with "
            f"`state.set_dataloader(dataloader, 'train')`."
        )
    if state.max_duration is None and event not in _WITHOUT_DURATION:
        raise AssertionError(
            f"{event} fires while training has an end, but state.max_duration is None. Set one first, such as "
            f"`state.max_duration = '10ep'`."
        )
