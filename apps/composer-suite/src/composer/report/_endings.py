"""What has ended a run, as far as whoever closes it can tell."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_events.state import State
    from composer_time import Time

__all__ = ["fatal_error", "reason_of_stop"]


def fatal_error(*, was_busy: bool) -> BaseException | None:
    """Return the exception that is on its way or, where work was left undone, has ended the process.

    Python forgets the latter as the exception on its way, and closes what is still open.
    """
    error = sys.exc_info()[1]
    return getattr(sys, "last_value", None) if error is None and was_busy else error


def reason_of_stop(state: State, planned: Time[int] | None) -> str | None:
    """Return who ended training before its time and why, `None` if it was as long as planned.

    Args:
        state: The state when training ends.
        planned: How long it was to be when it began.
    """
    if planned is None or state.timestamp >= planned:
        return None
    told = [
        f"{type(callback).__name__}: {reason}"
        for callback in state.callbacks
        if isinstance(reason := getattr(callback, "stop_reason", None), str)
    ]
    return "; ".join(told) or f"training was ended before {planned.to_timestring()}, by state.stop_training()"
