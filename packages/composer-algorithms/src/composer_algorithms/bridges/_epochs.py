"""Where the epochs of a loop of one's own begin and end."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from composer_algorithms.bridges._loop_events import LoopEvents, length_of
from composer_events.event import Event


class Epochs:
    """Comes to the events of epochs, in a loop that reads its batches here or by itself.

    Args:
        events: To be told.
        dataloader: What is read.
        num_microbatches: How many of its batches make one step.
    """

    def __init__(self, events: LoopEvents, dataloader: Iterable[Any], num_microbatches: int) -> None:
        _check_count(num_microbatches, dataloader)
        self._events = events
        self._dataloader = dataloader
        self._num_microbatches = num_microbatches
        self._num_read = 0  # batches of the dataloader
        self._num_to_skip = 0
        self._has_begun = False
        self._is_read_here = False

    def read(self) -> Iterator[Any]:
        """Yield the batches of an epoch, or of what a checkpoint has left of one."""
        self._is_read_here = True
        try:
            self._begin()
            iterator = itertools.islice(self._dataloader, self._num_to_skip, None)
            self._num_to_skip = 0
            while True:
                self._events.engine.run_event(Event.BEFORE_DATALOADER)
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                yield batch
            self._end()
        finally:
            self._is_read_here = False

    def begin_batch(self) -> None:
        """Begin an epoch if it is time to, where the loop reads by itself."""
        if not self._is_read_here:
            self._begin()
            self._events.engine.run_event(Event.BEFORE_DATALOADER)

    def count(self) -> None:
        """Count a batch of the dataloader."""
        self._num_read += 1

    def num_pieces(self) -> int:
        """Return how many batches of the dataloader make the next step: the last ones of an epoch may be fewer."""
        if self._num_microbatches == 1:
            return 1
        return max(1, min(self._num_microbatches, self._length() - self._num_read))

    def end_batch(self) -> None:
        """End an epoch if it is time to, where the loop reads by itself."""
        if not self._is_read_here and self._num_read >= self._length():
            self._end()

    def resume(self) -> None:
        """Go on within the epoch that the timestamp is in."""
        self._num_to_skip = int(self._events.state.timestamp.batch_in_epoch) * self._num_microbatches
        self._num_read = self._num_to_skip
        self._has_begun = False

    def _begin(self) -> None:
        events, engine = self._events, self._events.engine
        if not events.is_fitting:
            length = length_of(self._dataloader)
            num_batches = None if length is None else -(-length // self._num_microbatches)
            events.start_fit(self._dataloader, num_batches, events.state.max_duration)
        if self._has_begun:
            return
        if not self._is_read_here:
            self._length()
        self._has_begun = True
        if events.state.timestamp.batch_in_epoch == 0 and events.state.timestamp.epoch_in_iteration == 0:
            engine.run_event(Event.ITERATION_START)
        events.start_epoch()

    def _end(self) -> None:
        self._has_begun, self._num_read = False, 0
        self._events.end_epoch()
        self._events.engine.run_event(Event.EPOCH_CHECKPOINT)
        self._events.end_iteration_if_due()

    def _length(self) -> int:
        length = length_of(self._dataloader)
        if length is not None:
            return length
        raise RuntimeError(
            f"{type(self._dataloader).__name__} has no length, so nobody knows when an epoch ends: read it with "
            f"`for x, y in loop.epoch():`."
        )


def _check_count(num_microbatches: int, dataloader: object) -> None:
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches!r} is no number of batches: pass a whole number from 1.")
    if num_microbatches > 1 and length_of(dataloader) is None:
        raise ValueError(
            f"num_microbatches={num_microbatches!r} needs a dataloader that has a length, and "
            f"{type(dataloader).__name__} has none: nobody would know when fewer are left. Pass num_microbatches=1."
        )
