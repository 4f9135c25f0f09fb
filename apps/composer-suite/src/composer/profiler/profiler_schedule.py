"""Schedules that select the batches to profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from composer_events.arguments import check_counts
from composer_events.event import ProfilerAction

if TYPE_CHECKING:
    from composer_events.state import State

__all__ = ["cyclic_schedule"]


def cyclic_schedule(
    skip_first: int = 0, wait: int = 0, warmup: int = 1, active: int = 4, repeat: int = 1
) -> Callable[[State], ProfilerAction]:
    """Return a schedule for `Profiler` that cycles through waiting, warming up and recording in every epoch.

    The last batch of a cycle, or of an epoch inside one, saves the record.

    Args:
        skip_first: Number of batches skipped at the start of an epoch, or after resuming inside one.
        wait: Number of batches skipped in each cycle.
        warmup: Number of batches then recorded and discarded, to exclude the profiler's startup cost.
        active: Number of batches then recorded.
        repeat: Number of cycles in an epoch; 0 for as many as fit.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is negative, or `active` is 0.

    Example:
        >>> from types import SimpleNamespace
        >>> from composer_time import Timestamp
        >>> schedule = cyclic_schedule(skip_first=1, warmup=1, active=2)
        >>> def at(batch):
        ...     return SimpleNamespace(timestamp=Timestamp(batch_in_epoch=batch), dataloader_len=None, profiler=None)
        >>> [schedule(at(batch)).value for batch in range(5)]
        ['skip', 'warmup', 'active', 'active_and_save', 'skip']
    """
    check_counts(0, skip_first=skip_first, wait=wait, warmup=warmup, repeat=repeat)
    check_counts(active=active)
    cycle = wait + warmup + active

    def schedule(state: State) -> ProfilerAction:
        batch = state.timestamp.num_batches_in_epoch
        first = skip_first + getattr(state.profiler, "resumption_batch_idx", 0)
        if batch < first or (repeat and batch >= first + repeat * cycle):
            return ProfilerAction.SKIP
        position = (batch - first) % cycle
        if position < wait:
            return ProfilerAction.SKIP
        if position < wait + warmup:
            return ProfilerAction.WARMUP
        length = state.dataloader_len
        # The last batch of an epoch also saves, since the next epoch starts another cycle.
        if position == cycle - 1 or (length is not None and batch + 1 >= int(length)):
            return ProfilerAction.ACTIVE_AND_SAVE
        return ProfilerAction.ACTIVE

    return schedule
