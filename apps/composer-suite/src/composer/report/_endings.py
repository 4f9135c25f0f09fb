"""What has ended a run, as far as whoever closes it can tell."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from composer_events.state import State

__all__ = ["Plan", "fatal_error", "id_of_uncaught"]


def id_of_uncaught() -> int | None:
    """Return which exception nobody caught; the exception itself would keep alive what its frames hold."""
    return None if getattr(sys, "last_value", None) is None else id(sys.last_value)


def fatal_error(*, was_busy: bool, id_of_earlier: int | None) -> BaseException | None:
    """Return the exception that is on its way or, where work was left undone, has ended the process.

    Python forgets the latter as the exception on its way, and closes what is still open.

    Args:
        was_busy: Whether work was left undone.
        id_of_earlier: Of what nobody had caught before the run began, as in an earlier cell of a notebook.
    """
    error = sys.exc_info()[1]
    if error is None and was_busy and id_of_uncaught() not in (None, id_of_earlier):
        return sys.last_value
    return error


class Plan:
    """What is known when training begins of how it is to end.

    Args:
        state: The state then.
    """

    def __init__(self, state: State) -> None:
        self._duration = state.max_duration
        self._reasons = frozenset(_reasons(state))

    def reason_of_stop(self, state: State) -> str | None:
        """Return who has ended training before its time and why, `None` if it was as long as planned."""
        if self._duration is None or state.timestamp >= self._duration:
            return None
        told = [reason for reason in _reasons(state) if reason not in self._reasons]
        ended = "" if state.max_duration is None else f" at {state.max_duration.to_timestring()}"
        return "; ".join(told) or f"training has ended{ended}, and was to be {self._duration.to_timestring()} long"


def _reasons(state: State) -> Iterator[str]:
    """Yield what callbacks and algorithms say of why they have stopped training."""
    for each in (*state.callbacks, *state.algorithms):
        try:
            reason = getattr(each, "stop_reason", None)
        except Exception:  # whatever somebody else's property raises
            continue
        if isinstance(reason, str):
            yield f"{type(each).__name__}: {reason}"
