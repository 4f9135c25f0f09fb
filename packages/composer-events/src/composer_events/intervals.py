"""Telling at an event whether something that happens at intervals is due."""

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

# Looking them up on the class runs Python code in Python 3.11, and each batch asks.
_BATCH: Final = TimeUnit.BATCH
_EPOCH: Final = TimeUnit.EPOCH


def create_interval_scheduler(
    interval: str | int | Time[Any],
    include_end_of_training: bool = True,
    checkpoint_events: bool = True,
    final_events: set[Event] | None = None,
) -> Callable[[State, Event], bool]:
    """Make a function that says, at an event, whether an interval of training has just gone by.

    An interval in epochs is due at the end of an epoch, one in iterations at the end of an iteration and all others
    at the end of a batch: the first batch that reaches or passes a multiple of the interval. It is due once at the
    end of training too, unless that batch has been reported already.

    Args:
        interval: Epochs when a bare number. A part of training such as `'0.25dur'` is counted from `max_duration`
            when the function is called. 0 or less is never due.
        include_end_of_training: Whether the end of training counts.
        checkpoint_events: Whether to answer at the events `*_CHECKPOINT` or at `*_END`.
        final_events: The events at which the end of training is noticed. `BATCH_CHECKPOINT` and `EPOCH_CHECKPOINT`
            when `None`.

    Returns:
        A function `(state, event) -> bool`. Ask it at every event, as often as you like; it remembers the last batch
        that was due.

    Raises:
        RuntimeError: By the function, if a part of training is asked for and its length is not known.
    """
    # Users' suites read it from the last cell of the function's closure, so its name is the last one by alphabet.
    time_interval = ensure_time(interval, TimeUnit.EPOCH)
    finals = frozenset({Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT} if final_events is None else final_events)
    due_event = _due_event(time_interval.unit, checkpoint_events)
    is_crossed = _is_part_crossed if time_interval.unit is TimeUnit.DURATION else _is_crossed
    never = time_interval.value <= 0 if time_interval.unit is TimeUnit.DURATION else int(time_interval) <= 0
    last_batch: int = -1
    last_event: Event | None = None

    def is_due(state: State, event: Event) -> bool:
        nonlocal last_batch, last_event
        is_final = include_end_of_training and event in finals
        # Asked at every event of training: what does not concern it must leave quickly.
        if never or not (is_final or event is due_event) or state.previous_timestamp is None:
            return False
        batch = state.timestamp.num_batches
        if batch < last_batch:  # training has begun again
            last_batch = -1
        if (is_final or batch == last_batch) and _is_over(state):
            # Several events follow the last batch, and one of them is enough: whoever asks again gets the same answer.
            if batch == last_batch and event is not last_event:
                return False
            last_batch, last_event = batch, event
            return True
        if event is due_event and is_crossed(state, time_interval):
            last_batch, last_event = batch, event
            return True
        return False

    return is_due


def evaluate_periodically(
    eval_interval: str | int | Time[Any], eval_at_fit_end: bool = True
) -> Callable[[State, Event], bool]:
    """Make the function that an `Evaluator` makes of its `eval_interval`.

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
    """Return how many of a unit have gone by, without an object for it where a batch asks."""
    if unit is _BATCH:
        return now.num_batches
    return now.num_epochs if unit is _EPOCH else now.get(unit).value


def _is_crossed(state: State, interval: Time[Any]) -> bool:
    return _crosses(state, interval.unit, int(interval))


def _crosses(state: State, unit: TimeUnit, length: int) -> bool:
    assert state.previous_timestamp is not None
    if length <= 0:
        return False
    before, now = _count(state.previous_timestamp, unit), _count(state.timestamp, unit)
    return before // length != now // length


def _is_part_crossed(state: State, interval: Time[Any]) -> bool:
    part, duration = _as_written(interval.value), state.max_duration
    if duration is None:
        raise RuntimeError(
            f"The interval {interval.to_timestring()!r} is a part of training, which has no max_duration yet. Set "
            f"state.max_duration, or give the interval in another unit, such as '100ba'."
        )
    if duration.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH):
        return _crosses(state, duration.unit, math.ceil(part * duration.value))
    num_batches = duration.value
    if duration.unit is TimeUnit.EPOCH:
        num_batches *= _batches_in_epoch(state, interval)
    length = math.ceil(part * num_batches)
    return length > 0 and state.timestamp.num_batches % length == 0


@functools.lru_cache(maxsize=64)  # asked at every batch
def _as_written(part: float) -> Fraction:
    # In binary, 0.07 of 100 batches would be 7.000000000000001, which rounds up to 8.
    return Fraction(str(part))


def _batches_in_epoch(state: State, interval: Time[Any]) -> int:
    if state.dataloader_len is None:
        raise RuntimeError(
            f"The interval {interval.to_timestring()!r} is a part of training, whose length in batches is not known, "
            f"since the dataloader has no length. Set state.dataloader_len, or give the interval in another unit, "
            f"such as '100ba'."
        )
    return state.dataloader_len.value
