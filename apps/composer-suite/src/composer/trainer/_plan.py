"""What a fit trains on and how long: the data, how batches are cut, and the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from composer.trainer._arguments import check_iterable, check_subset
from composer.trainer._data import TrainBatches
from composer.trainer._distributed import share_length
from composer.trainer._evaluation import restore_dataloader
from composer.trainer._schedules import SchedulerSteps, check_time_left
from composer_events.data_spec import ensure_data_spec

if TYPE_CHECKING:
    from composer.trainer._microbatching import Microbatching
    from composer.trainer._ranks import Ranks
    from composer.trainer._schedules import Schedule
    from composer_checkpoint.data_position import DataPosition
    from composer_events.data_spec import DataSpec
    from composer_events.engine import Engine
    from composer_events.state import State

__all__ = ["Plan", "check_data"]


def check_data(dataloader: Any, microbatching: Microbatching) -> DataSpec:
    """Return a dataloader as a DataSpec.

    Raises:
        TypeError, ValueError, AttributeError: If it cannot be read, or its batches cannot be cut.
    """
    check_iterable("train_dataloader", dataloader)
    data_spec = ensure_data_spec(dataloader)
    microbatching.resolve(data_spec)
    return data_spec


class Plan:
    """Keeps what the constructor was given until a fit needs it, and what a fit changes.

    Attributes:
        microbatching: How batches are cut, as the user said.
        steps_every_batch: How often schedulers step; see `SchedulerSteps`.
    """

    def __init__(
        self, state: State, engine: Engine, ranks: Ranks, position: DataPosition, microbatching: Microbatching
    ) -> None:
        self._state = state
        self._engine = engine
        self._ranks = ranks
        self._position = position
        self._batches: TrainBatches | None = None
        self._schedule: Schedule | None = None  # what waits for a duration and a dataloader
        self._cut: tuple[Microbatching, DataSpec] | None = None  # what the state's size of microbatches follows
        self.microbatching = microbatching
        self.steps_every_batch: bool | None = True

    def set_data(self, data_spec: DataSpec, label: str, subset_num_batches: int) -> TrainBatches:
        """Train on this from now on. Every rank must call this."""
        state = self._state
        state.set_dataloader(data_spec.dataloader, label, subset_num_batches)
        share_length(state)
        state.train_dataloader = data_spec.dataloader
        self._set_microbatching(data_spec)
        self._batches = TrainBatches(data_spec, state, self._engine, self._ranks, self._position)
        return self._batches

    def choose_batches(self, dataloader: Any, label: str, subset_num_batches: int | None) -> TrainBatches:
        """Return the batches of a new dataloader, or of the one there is.

        Raises:
            ValueError: If there is none.
        """
        if subset_num_batches is not None:
            check_subset("train_subset_num_batches", subset_num_batches)
        if dataloader is not None:
            subset_num_batches = -1 if subset_num_batches is None else subset_num_batches
            return self.set_data(check_data(dataloader, self.microbatching), label, subset_num_batches)
        if self._batches is None:
            raise ValueError(
                "train_dataloader is a required argument and must be specified when constructing the Trainer or when "
                "calling Trainer.fit(). Give an iterable of batches, such as a torch DataLoader."
            )
        self._set_microbatching(self._batches.data_spec)
        if subset_num_batches is not None:
            self._state.dataloader_len = subset_num_batches
            share_length(self._state)
        return self._batches

    def _set_microbatching(self, data_spec: DataSpec) -> None:
        """Cut batches as the user said, unless they are cut so already; a size that was found out stays."""
        cut = (self.microbatching, data_spec)
        if self._cut == cut:
            return
        state = self._state
        state.device_train_microbatch_size = self.microbatching.resolve(data_spec)
        state.grad_accum, state.auto_microbatching = self.microbatching.count, self.microbatching.is_auto
        self._cut = cut

    def set_schedule(self, schedule: Schedule, *, begins_now: bool = False) -> None:
        """Compile the schedulers given, now or as soon as the duration and the dataloader that they need are known.

        Args:
            schedule: The schedulers. Without any, those of before stay.
            begins_now: Whether training is about to begin, and needs time that is left.

        Raises:
            ValueError: If a scheduler or the duration cannot be used. The learning rate is then as it was.
        """
        state = self._state
        if schedule.schedulers:
            self._schedule = schedule
        is_known = state.max_duration is not None and state.dataloader is not None
        waiting = self._schedule if is_known else None
        if waiting is not None:
            state.max_duration = waiting.scale(state.max_duration)
        if begins_now:
            check_time_left(state)  # before the schedulers set the learning rate, which nobody could take back
        if waiting is not None:
            state.schedulers = waiting.compile(state)
            self.steps_every_batch, self._schedule = waiting.every_batch, None
        if begins_now:  # a load, another duration or a stop has changed what they say since they set the rates
            SchedulerSteps(state, self.steps_every_batch).set_rates()

    def begin_again(self, batches: TrainBatches) -> None:
        """Read the data from its start, since the timestamp was set back."""
        batches.restart()
        self._position.forget()

    def close(self) -> None:
        """End the dataloader's worker processes, be it that they persist or that an epoch was left in the middle."""
        if self._batches is not None:
            self._batches.restart()
        self._position.close()

    @contextmanager
    def undone_if_refused(self) -> Iterator[None]:
        """Put back what a fit was about to change, should it turn out that it cannot begin."""
        state = self._state
        names = ("_batches", "microbatching", "_cut", "_schedule", "steps_every_batch")
        own = {name: getattr(self, name) for name in names}
        names = ("train_dataloader", "max_duration", "stopped_duration", "timestamp")
        names += ("device_train_microbatch_size", "grad_accum", "auto_microbatching")
        shared = {name: getattr(state, name) for name in names} | {"schedulers": list(state.schedulers)}
        data = (state.dataloader, state.dataloader_label, state.dataloader_len)
        try:
            yield
        except BaseException:
            for holder, values in ((self, own), (state, shared)):
                for name, value in values.items():
                    setattr(holder, name, value)
            restore_dataloader(state, *data)
            raise
