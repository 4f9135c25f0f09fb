"""Garbage collection after the same batches on all ranks."""

import gc
from typing import Any

from composer_events.arguments import check_counts
from composer_events.callback import Callback
from composer_events.event import Event
from composer_events.logger import Logger
from composer_events.state import State

__all__ = ["ScheduledGarbageCollector"]


class ScheduledGarbageCollector(Callback):
    """Collect garbage on all ranks after the same batches, instead of on each rank at a time of its own.

    A rank in a garbage collection, which takes up to some tenths of a second, keeps all others waiting at their next
    collective. During `fit`, this callback turns automatic collection off. It collects at the start, every
    `batch_interval` batches, and before and after each evaluation and save. The setting from before is restored at the
    end of `fit`, after an error too.

    Args:
        batch_interval: Number of batches between two collections.
        generation: The oldest generation that these collect; see `gc.collect`. The others collect all generations.

    Raises:
        TypeError: If an argument is not a whole number.
        ValueError: If `batch_interval` is less than 1, or `generation` is not 0, 1 or 2.

    Example:
        >>> collector = ScheduledGarbageCollector(batch_interval=100)
    """

    def __init__(self, batch_interval: int = 50, generation: int = 1) -> None:
        check_counts(batch_interval=batch_interval)
        check_counts(least=0, generation=generation)
        if generation > 2:
            raise ValueError(f"generation={generation!r} must be 0, 1 or 2.")
        self.batch_interval = batch_interval
        self.generation = generation
        self._was_enabled = self._has_saved = False

    def fit_start(self, state: State, logger: Logger) -> None:
        """Turn automatic collection off."""
        self._was_enabled |= gc.isenabled()  # already set if an earlier `fit` has failed
        gc.disable()
        gc.collect()

    def batch_start(self, state: State, logger: Logger) -> None:
        """Collect after a save."""
        if self._has_saved:
            self._has_saved = False
            gc.collect()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Collect if it is due."""
        if state.timestamp.num_batches % self.batch_interval == 0:
            gc.collect(self.generation)

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Collect before and after an evaluation."""
        gc.collect()

    eval_after_all = eval_before_all

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Collect before a save."""
        self._prepare_save(Event.BATCH_CHECKPOINT, state)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Collect before a save."""
        self._prepare_save(Event.EPOCH_CHECKPOINT, state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Restore the setting of automatic collection."""
        if self._was_enabled:
            gc.enable()
        self._was_enabled = self._has_saved = False

    close = fit_end

    def _prepare_save(self, event: Event, state: State) -> None:
        savers: list[Any] = [callback for callback in state.callbacks if callback.saves_checkpoints]
        if any(saver.is_save_due(state, event) for saver in savers):
            self._has_saved = True
            gc.collect()
