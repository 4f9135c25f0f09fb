"""Calling, observing and closing the callbacks and algorithms of an engine."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, cast

from composer_events.batches import ensure_tuple, innermost_dataloader
from composer_events.event import Event, ProfilerAction
from composer_events.logger import Logger

if TYPE_CHECKING:
    from composer_events.callback import Callback
    from composer_events.passes import AlgorithmPass
    from composer_events.state import State
    from composer_time import Timestamp

# The name by which users filter, which stays the same if the engine moves to another package.
_log = logging.getLogger("composer.core.engine")

_num_at_work = 0  # closers running in this process


def is_closing() -> bool:
    """Return whether callbacks of any engine are being closed, in any thread."""
    return _num_at_work > 0


class Closer:
    """Closes the callbacks of one engine.

    `atexit` holds this object, so it refers to the state and the logger but not to the engine: an unused engine can be
    garbage collected, and its `__del__` closes the callbacks.
    """

    def __init__(self, state: State, logger: Logger) -> None:
        self._state, self._logger = state, logger
        self.is_closed = False
        self.context: Callable[[], AbstractContextManager[Any]] = nullcontext
        atexit.register(self.close)

    def is_done(self) -> bool:
        """Return whether training has reached `max_duration` and no event is running."""
        elapsed = getattr(self._state, "get_elapsed_duration", lambda: None)()
        # A hook may construct another Trainer, which must not close the engine of the running event.
        return elapsed is not None and float(elapsed) >= 1 and self._state.num_running_events == 0

    def stand_down(self) -> None:
        """Mark the engine as closed without closing any callback."""
        self.is_closed = True
        atexit.unregister(self.close)

    def close(self) -> None:
        """Call every callback's `close`, then `post_close` of those whose `close` succeeded.

        Errors are only logged. A `KeyboardInterrupt` or a `SystemExit` is raised after all callbacks were closed.
        """
        if self.is_closed:
            return
        global _num_at_work
        _num_at_work += 1
        try:
            with self.context():
                self._close()
        finally:
            _num_at_work -= 1

    def _close(self) -> None:
        self.stand_down()  # first, so that a callback that closes the engine again does not recurse
        _log.debug("Closing the engine.")
        interrupts: list[BaseException] = []

        def attempt(call: Callable[..., object], failure: str, *arguments: object) -> bool:
            try:
                call(*arguments)
            except Exception:
                _log.exception(failure)
            except BaseException as interrupt:
                interrupts.append(interrupt)
            else:
                return True
            return False

        def flush() -> None:
            if isinstance(self._logger, Logger):  # pyright: ignore[reportUnnecessaryIsInstance]  # others buffer nothing
                attempt(self._logger.flush, "Error delivering metrics while closing.")

        closed: list[Any] = []
        # A copy, because a callback may change the list while it closes.
        for callback in tuple(self._state.callbacks):
            name = type(callback).__name__
            _log.debug("Closing callback %s", name)
            # Before each `close`, because a closed destination cannot receive the metrics that were buffered for it.
            flush()
            failure = f"Error running {name}.close(). Its post_close() is skipped."
            if attempt(callback.close, failure, self._state, self._logger):
                closed.append(callback)
        for callback in closed:
            name = type(callback).__name__
            flush()
            _log.debug("Post-closing callback %s", name)
            if attempt(callback.post_close, f"Error running {name}.post_close()."):
                _OPEN.pop(id(callback), None)  # free for another run
        flush()
        _shut_down_workers(self._state)
        _log.debug("Engine closed.")
        if interrupts:
            raise interrupts[0]


def _shut_down_workers(state: State) -> None:
    """Stop the persistent worker processes of the dataloaders, which would otherwise outlive training."""
    # Any object may be a state, so an attribute may be missing.
    holders: list[Any] = [getattr(state, "train_dataloader", None), getattr(state, "dataloader", None)]
    holders += ensure_tuple(getattr(state, "evaluators", None))
    for loader in map(innermost_dataloader, holders):
        if not getattr(loader, "persistent_workers", False) or getattr(loader, "_iterator", None) is None:
            continue
        # torch has no public way to stop them. Without `_iterator` the dataloader starts new workers on the next use.
        try:
            loader._iterator._shutdown_workers()
            loader._iterator = None
        except Exception as error:
            _log.debug("The workers of %s were left to end by themselves: %r", type(loader).__name__, error)


_METHOD_OF: Final = {"algorithm": "match", "callback": "run_event"}


def invalid_hook(kind: str, hook: object) -> TypeError | None:
    """Return the error for an item of a list of algorithms or callbacks that is not one, else `None`."""
    method = _METHOD_OF.get(kind)
    is_class = isinstance(hook, type)
    if method is None or (hasattr(hook, method) and not is_class):
        return None
    hint = f"an object of {'that class' if is_class else f'a class that derives from {kind.capitalize()}'}"
    hint += f": {hook.__name__}(...)" if is_class else ""
    return TypeError(f"state.{kind}s holds {hook!r}, not a valid {kind}: it has no {method}(). Put in {hint}.")


def explain_failure(error: Exception, kind: str, hook: object, event: Event, state: State) -> None:
    """Add a note to the error of a hook or pass that names it and the time, or raise that the hook is not one."""
    if (invalid := invalid_hook(kind, hook)) is not None:
        raise invalid from error
    when = ""
    with suppress(Exception):  # a state without a usable timestamp must not hide the error
        when = f" (epoch {int(state.timestamp.epoch)}, batch {int(state.timestamp.batch)})"
    name = hook.__name__ if isinstance(hook, FunctionType) else type(hook).__name__
    error.add_note(f"raised by {kind} {name} on {event}{when}")


_RECORDED: Final = (ProfilerAction.ACTIVE, ProfilerAction.ACTIVE_AND_SAVE, ProfilerAction.WARMUP)
# These surround the batches, so they may fire in a step that the profiler's schedule skips.
_ALSO_SKIPPED: Final = frozenset({Event.INIT, Event.FIT_START, Event.EPOCH_START, Event.EPOCH_END})


class Observer:
    """Times events and hooks with the profiler's markers, and writes debug lines if `ENGINE_DEBUG` is set.

    The profiler is any object with `marker(name, actions=..., categories=...)`, whose result has `start()` and
    `finish()` and is a context manager.
    """

    def __init__(self) -> None:
        self.writes_debug_lines = bool(os.environ.get("ENGINE_DEBUG"))
        self._started: dict[str, Any] = {}

    def is_needed(self, state: State) -> bool:
        """Return whether debug lines are written or the state has a profiler."""
        return self.writes_debug_lines or getattr(state, "profiler", None) is not None

    def finish_marker(self, event: Event, state: State) -> None:
        """Finish the marker of the pair of events that this event ends, if it was started."""
        if getattr(state, "profiler", None) is None or not event.is_after_event:
            return
        marker = self._started.pop(event.canonical_name, None)
        if marker is not None:
            marker.finish()

    def start_marker(self, event: Event, state: State) -> None:
        """Start the marker of the pair of events that this event begins."""
        profiler: Any = getattr(state, "profiler", None)
        if profiler is None or not event.is_before_event:
            return
        name = event.canonical_name
        if name in self._started:  # an exception prevented the closing event
            self._started.pop(name).finish()
        actions = (*_RECORDED, ProfilerAction.SKIP) if event in _ALSO_SKIPPED else _RECORDED
        self._started[name] = profiler.marker(f"event/{name}", actions=actions)
        self._started[name].start()

    def write(self, event: Event, state: State, what: str) -> None:
        """Write a debug line if `ENGINE_DEBUG` is set."""
        if self.writes_debug_lines:
            _log.debug("%s: Running %s", _log_prefix(event, state), what)

    def marker(self, kind: str, hook: object, event: Event, state: State) -> AbstractContextManager[Any]:
        """Return the profiler's marker around the call of a hook, and write a debug line."""
        name, profiler = hook.__class__.__name__, getattr(state, "profiler", None)
        self.write(event, state, f"{kind} {name}")
        if profiler is None:
            return nullcontext()
        return profiler.marker(f"{kind}/{name}/event/{event.value}", categories=[event.value, name])


def _log_prefix(event: Event, state: State) -> str:
    """Return the prefix of a debug line, such as `[ep=0][ba=12][event=BATCH_END]`."""
    stage = ""
    if event.is_eval or event.is_predict:
        kind = "eval" if event.is_eval else "predict"
        timestamp: Timestamp | None = getattr(state, f"{kind}_timestamp", None)  # only State has these
        stage = "" if timestamp is None else f"[{kind}_ba={int(timestamp.batch)}]"
    return f"[ep={int(state.timestamp.epoch)}][ba={int(state.timestamp.batch)}]{stage}[event={event.name}]"


# Callbacks in use, by id, because a callback need not be hashable; weakly, because a deleted one is no longer in use.
_OPEN: Final[weakref.WeakValueDictionary[int, Callback]] = weakref.WeakValueDictionary()


_CLOSERS: Final[weakref.WeakValueDictionary[int, Closer]] = weakref.WeakValueDictionary()  # by id of the callback


def mark_in_use(callbacks: Sequence[Callback], closer: Closer) -> None:
    """Mark callbacks as in use. If a callback's earlier engine has finished training, close that engine first."""
    for callback in callbacks:
        if (invalid := invalid_hook("callback", callback)) is not None:
            raise invalid
        before = _CLOSERS.get(id(callback))
        # An id is reused after its object is deleted, so the object itself is compared too.
        if _OPEN.get(id(callback)) is callback and before is not closer and before is not None and before.is_done():
            before.close()
        if _OPEN.get(id(callback)) is callback:
            raise RuntimeError(
                f"Cannot create a new trainer with an open callback or logger from a previous trainer: "
                f"{callback!r} ({type(callback).__name__}) is still in use, and that one has not trained to its end. "
                f"Call `trainer.close()` (or `engine.close()`) on the previous one first, or make a new "
                f"{type(callback).__name__}."
            )
    for callback in callbacks:  # a second loop, so that an error above marks none
        _OPEN[id(callback)] = callback
        _CLOSERS[id(callback)] = closer


def parse_passes(passes: object) -> list[tuple[AlgorithmPass, int]]:
    """Convert the `algorithm_passes` argument into pairs of a pass and its index."""
    if passes is None:
        return []
    # A list of two may also be one pass with its index, as in `[f, 0]`.
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
    """Check that the state has what an event requires."""
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
