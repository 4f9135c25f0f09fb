"""Show the engine's work to a profiler and to the log."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from composer_events._calling import call_hook
from composer_events.event import Event
from composer_events.profiler_action import ProfilerAction

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State
    from composer_time import Timestamp

# The name by which users filter it, whichever package the engine lives in.
_log = logging.getLogger("composer.core.engine")

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
