"""Functions that return whether something that happens at intervals is due."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from composer_events.event import Event
from composer_time import Time, TimeUnit, ensure_time

if TYPE_CHECKING:
    from composer_events.state import State
    from composer_time import Timestamp

__all__ = ["create_interval_scheduler", "evaluate_periodically"]

# Attribute access on an Enum class runs Python code in Python 3.11, and these are read at every batch.
_BATCH: Final = TimeUnit.BATCH
_EPOCH: Final = TimeUnit.EPOCH


def create_interval_scheduler(
    interval: str | int | Time[Any],
    include_end_of_training: bool = True,
    checkpoint_events: bool = True,
    final_events: set[Event] | None = None,
) -> Callable[[State, Event], bool]:
    """Create a function that returns, at an event, whether an interval of training has just ended.

    An interval in epochs is due at the end of an epoch, one in iterations at the end of an iteration and all others at
    the end of a batch: the first batch that reaches or passes a multiple of the interval. It is also due once at the
    end of training, unless that batch was already due.

    Args:
        interval: A bare number counts epochs. A fraction of training such as `'0.25dur'` is computed from
            `max_duration` when the function is called. 0 or less is never due.
        include_end_of_training: Whether the end of training is due.
        checkpoint_events: Whether intervals are due at the events `*_CHECKPOINT` instead of `*_END`.
        final_events: The events at which the end of training is checked. `BATCH_CHECKPOINT` and `EPOCH_CHECKPOINT` if
            `None`.

    Returns:
        A function `(state, event) -> bool`. It may be called at every event, any number of times; it stores the last
        batch that was due. Its attribute `interval` is the interval as a `Time`.

    Raises:
        RuntimeError: By the function, if the interval is a fraction of training and its length is unknown, unless it is
            `'1dur'` and the end of training is due.
    """
    # Users' test suites read it from the last cell of the function's closure. Cells are sorted by name, so this name
    # must come last.
    time_interval = ensure_time(interval, TimeUnit.EPOCH)
    finals = frozenset({Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT} if final_events is None else final_events)
    due_event = _due_event(time_interval.unit, checkpoint_events)
    is_part = time_interval.unit is TimeUnit.DURATION
    never = time_interval.value <= 0
    last_batch: int = -1
    last_event: Event | None = None

    def is_due(state: State, event: Event) -> bool:
        nonlocal last_batch, last_event
        is_final = include_end_of_training and event in finals
        # Called at every event, so it returns early if the event is irrelevant.
        if never or not (is_final or event is due_event) or state.previous_timestamp is None:
            return False
        batch = state.timestamp.num_batches
        if batch < last_batch:  # the timestamp was reset
            last_batch = -1
        if (is_final or batch == last_batch) and _is_over(state):
            # Several events follow the last batch, and only one of them is due. Repeated calls on it return the same.
            is_now = batch != last_batch or event is last_event
        else:
            is_now = event is due_event and (
                _is_part_crossed(state, time_interval, include_end_of_training)
                if is_part
                else _crosses(state, time_interval.unit, int(time_interval))
            )
        if is_now:
            last_batch, last_event = batch, event
        return is_now

    is_due.interval = time_interval  # pyright: ignore[reportFunctionMemberAccess]  # for loops that compare ranks
    return is_due


def evaluate_periodically(
    eval_interval: str | int | Time[Any], eval_at_fit_end: bool = True
) -> Callable[[State, Event], bool]:
    """Create the function that an `Evaluator` uses for its `eval_interval`.

    Args:
        eval_interval: As in `create_interval_scheduler`.
        eval_at_fit_end: Whether to evaluate also when training ends between two intervals.
    """
    return create_interval_scheduler(
        eval_interval,
        include_end_of_training=eval_at_fit_end,
        checkpoint_events=False,
        final_events={Event.FIT_END},
    )


def _due_event(unit: TimeUnit, checkpoint_events: bool) -> Event:
    if unit is TimeUnit.EPOCH:
        return Event.EPOCH_CHECKPOINT if checkpoint_events else Event.EPOCH_END
    if unit is TimeUnit.ITERATION:
        return Event.ITERATION_CHECKPOINT if checkpoint_events else Event.ITERATION_END
    return Event.BATCH_CHECKPOINT if checkpoint_events else Event.BATCH_END


def _is_over(state: State) -> bool:
    duration = state.max_duration
    return duration is not None and _count(state.timestamp, duration.unit) >= duration.value


def _count(now: Timestamp, unit: TimeUnit) -> float:
    """Return the count in one unit, without creating a `Time` for batches and epochs."""
    if unit is _BATCH:
        return now.num_batches
    return now.num_epochs if unit is _EPOCH else now.get(unit).value


def _crosses(state: State, unit: TimeUnit, length: int) -> bool:
    assert state.previous_timestamp is not None
    if length <= 0:
        return False
    # Not a remainder, because a batch may pass a multiple of the interval without reaching it exactly.
    before, now = _count(state.previous_timestamp, unit), _count(state.timestamp, unit)
    return before // length != now // length


def _is_part_crossed(state: State, interval: Time[Any], include_end: bool) -> bool:
    part, duration = _as_written(interval.value), state.max_duration
    if duration is None:
        raise RuntimeError(
            f"The interval {interval.to_timestring()!r} is a part of training, which has no max_duration yet. Set "
            f"state.max_duration, or give the interval in another unit, such as '100ba'."
        )
    # A batch may pass a multiple of samples or tokens without reaching it exactly; batches are counted one by one.
    if duration.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH):
        return _crosses(state, duration.unit, math.ceil(part * duration.value))
    # Epochs are converted to batches, so that a fraction of an epoch can be due.
    num_batches = duration.value
    if duration.unit is TimeUnit.EPOCH:
        if part >= 1 and include_end and state.dataloader_len is None:
            return False  # due at the end of training only, for which the number of batches is not needed
        num_batches *= _batches_in_epoch(state, interval)
    length = math.ceil(part * num_batches)
    return length > 0 and state.timestamp.num_batches % length == 0


@functools.lru_cache(maxsize=64)  # called at every batch
def _as_written(part: float) -> Fraction:
    # As binary floats, 0.07 * 100 batches is 7.000000000000001, which rounds up to 8.
    return Fraction(str(part))


def _batches_in_epoch(state: State, interval: Time[Any]) -> int:
    if state.dataloader_len is None:
        raise RuntimeError(
            f"The interval {interval.to_timestring()!r} is a part of training, whose length in batches is not known, "
            f"since the dataloader has no length. Set state.dataloader_len, or give the interval in another unit, "
            f"such as '100ba'."
        )
    return state.dataloader_len.value
