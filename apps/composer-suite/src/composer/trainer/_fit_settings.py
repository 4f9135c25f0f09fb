"""Data, duration and learning rate schedules of a fit, and the steps of the schedulers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import is_not
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from composer.trainer._arguments import check_subset
from composer.trainer._data import TrainBatches, restore_dataloader, with_batch_size
from composer.trainer._progress import has_time_left
from composer.trainer._strategies import share_length
from composer_dist import get_global_rank
from composer_events.batches import ensure_tuple
from composer_events.data_spec import ensure_data_spec
from composer_events.state import State
from composer_optim import compile_composer_schedulers
from composer_optim.compile import check_together, compiled_for, set_last_rates, set_rates
from composer_optim.torch_schedulers import check_ratio, scale_pytorch_schedulers
from composer_time import Time, TimeUnit, ensure_time

if TYPE_CHECKING:
    from composer.trainer._microbatching import Microbatching
    from composer.trainer._rank_sync import Ranks
    from composer_events.data_position import DataPosition
    from composer_events.data_spec import DataSpec
    from composer_events.engine import Engine


_log = logging.getLogger(__name__)


class SchedulerSteps:
    """Steps all schedulers of the state after each batch or after each epoch.

    By default they step after each epoch if one of them is a PyTorch scheduler, which counts epochs, and otherwise
    after each batch. PyTorch schedulers count their steps. Composer schedulers are functions of the state's timestamp,
    so each batch trains with the rate of its timestamp, even after a load or a reset.
    """

    def __init__(self, state: State, every_batch: bool | None) -> None:
        check_together(state.schedulers)
        self._state = state
        self._schedulers = state.schedulers  # always the same list object
        self._every_batch = every_batch
        self._set_for = self._moment()

    def before_batch(self) -> None:
        """Set the rates again if the time or the length of training has changed since a step set them."""
        if self._has_moved() and has_time_left(self._state):
            self.set_rates()

    def after_batch(self) -> None:
        """Step the schedulers if they step after each batch; the timestamp counts the batch already."""
        if self._steps_every_batch():
            self._step()

    def after_epoch(self) -> None:
        """Step the schedulers if they step after each epoch; the timestamp counts the epoch already."""
        if not self._steps_every_batch():
            self._step()

    def set_rates(self) -> None:
        """Set the learning rates of Composer schedulers for the current time. PyTorch schedulers do not step."""
        state, now = self._state, self._state.timestamp
        if not self._steps_every_batch():  # the rate is constant within an epoch
            state.timestamp = now.copy(
                batch=now.num_batches - now.num_batches_in_epoch,
                sample=now.num_samples - now.num_samples_in_epoch,
                token=now.num_tokens - now.num_tokens_in_epoch,
                batch_in_epoch=0,
                sample_in_epoch=0,
                token_in_epoch=0,
            )
        try:
            for scheduler in self._schedulers:
                if compiled_for(scheduler) is not None:
                    set_rates(scheduler)
        finally:
            state.timestamp = now
        self._set_for = self._moment()

    def _step(self) -> None:
        # A stop sets max_duration to the current time, which would move Composer schedules to their end.
        is_stopped = self._state.max_duration is not self._set_for[-1] and not has_time_left(self._state)
        for scheduler in self._schedulers:
            if not is_stopped or compiled_for(scheduler) is None:
                scheduler.step()
        self._set_for = self._moment()

    def _has_moved(self) -> bool:
        (time, *lengths), (before, *lengths_before) = self._moment(), self._set_for
        # Lengths by identity, because comparing two of different units raises.
        return (time is not before and time != before) or any(map(is_not, lengths, lengths_before))

    def _moment(self) -> tuple[Any, ...]:
        """Return the values that the rates depend on."""
        state, now = self._state, self._state.timestamp
        if self._steps_every_batch():
            return now, state.dataloader_len, state.max_duration
        epoch = (now.num_iterations, now.num_epochs, now.num_batches - now.num_batches_in_epoch)
        return epoch, state.dataloader_len, state.max_duration

    def _steps_every_batch(self) -> bool:
        if self._every_batch is not None:
            return self._every_batch
        return all(compiled_for(scheduler) is not None for scheduler in self._schedulers)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedulers of the user, with their settings.

    Attributes:
        schedulers: In the order given.
        ratio: Factor for schedules and duration.
        every_batch: Whether to step after each batch; for `None` see `SchedulerSteps`.
    """

    schedulers: tuple[Any, ...]
    ratio: float
    every_batch: bool | None

    @classmethod
    def of(cls, schedulers: Any, ratio: float, every_batch: bool | None) -> Schedule:
        given = ensure_tuple(schedulers)
        for scheduler in given:
            if isinstance(scheduler, ReduceLROnPlateau):
                raise ValueError(
                    f"schedulers holds a {type(scheduler).__name__}, whose steps need a loss, and the trainer steps "
                    f"schedulers without one. Use one that goes by time, or step it in a callback's eval_end."
                )
            is_class = isinstance(scheduler, type)
            if not isinstance(scheduler, LRScheduler) and (is_class or not callable(scheduler)):
                hint = f"Call it: {scheduler.__name__}(...)." if is_class else "Give one, such as LinearScheduler()."
                raise TypeError(
                    f"schedulers holds {scheduler!r}, which is not a scheduler of PyTorch or Composer, nor a function "
                    f"of the state. {hint}"
                )
        if given:
            check_together(given)
        if ratio != 1.0:
            check_ratio(ratio)
        for name, is_given in (
            ("scale_schedule_ratio", ratio != 1.0),
            ("step_schedulers_every_batch", every_batch is not None),
        ):
            if is_given and not given:
                raise ValueError(
                    f"Specifying `{name}` without `schedulers` has no effect. Give schedulers too, or drop it."
                )
        return cls(given, ratio, every_batch)

    def scale(self, duration: Time[Any] | None) -> Time[Any] | None:
        """Return the duration, scaled like the schedules."""
        if duration is None or self.ratio == 1.0:
            return duration
        scaled = duration * self.ratio
        if scaled.value <= 0:
            raise ValueError(
                f"Scale schedule has reduced the max_duration to 0: scale_schedule_ratio={self.ratio!r} of "
                f"max_duration={duration.to_timestring()!r}. Raise either of them."
            )
        return scaled

    def compile(self, state: State) -> list[LRScheduler]:
        """Scale every schedule, compile all to PyTorch schedulers, and set the learning rates."""
        for scheduler in self.schedulers:
            if compiled_for(scheduler) not in (None, state):
                raise ValueError(
                    f"schedulers holds a {type(scheduler).__name__} that was compiled for another State than the "
                    f"trainer's, whose timestamp does not move. Give the Composer scheduler itself, uncompiled."
                )
        if not all(isinstance(scheduler, LRScheduler) for scheduler in self.schedulers):
            return compile_composer_schedulers(self.schedulers, state, self.ratio)
        scale_pytorch_schedulers(self.schedulers, self.ratio)
        return list(self.schedulers)


@contextmanager
def following_load(state: State) -> Generator[None]:
    """Return a context for a load that keeps learning rates and schedulers consistent.

    PyTorch schedulers compute the next rate from the optimizer's rate. If only one of the two has been loaded, they
    belong to different times, so the optimizer gets the scheduler's rate. If the checkpoint's rate replaces the
    script's, that is logged.
    """
    schedulers: dict[Optimizer, list[Any]] = {}
    for scheduler in state.schedulers:
        if hasattr(scheduler, "_last_lr"):  # returned by get_last_lr; user classes may not set it
            schedulers.setdefault(scheduler.optimizer, []).append(scheduler)
    given, parts = _base_lrs(state, schedulers), _parts(schedulers)
    yield
    for (optimizer, theirs), now, before in zip(schedulers.items(), _parts(schedulers), parts, strict=True):
        if len(set(map(is_not, now, before))) == 2:  # only one of the two was replaced by the load
            set_last_rates(theirs, optimizer)
    loaded = _base_lrs(state, schedulers)
    if loaded != given and get_global_rank() == 0:
        _log.warning(
            "The script's lr=%s is replaced by the checkpoint's lr=%s. To train with the script's, pass "
            "load_ignore_keys=['%s'].",
            *(", ".join(f"{lr:g}" for lr in dict.fromkeys(lrs)) for lrs in (given, loaded)),
            "state/schedulers/*" if schedulers else "state/optimizers/*/lr",
        )


def _parts(schedulers: Mapping[Optimizer, list[Any]]) -> list[list[object]]:
    return [
        [optimizer.param_groups, *(each.get_last_lr() for each in theirs)] for optimizer, theirs in schedulers.items()
    ]


def _base_lrs(state: State, schedulers: Mapping[Optimizer, list[Any]]) -> list[float]:
    """Return the learning rate that the schedule of each group of each optimizer begins with."""
    # By the groups, which an optimizer such as SAM shares with the one that it wraps and the schedulers hold.
    of_schedulers = {id(each.param_groups): getattr(schedulers[each][-1], "base_lrs", None) for each in schedulers}
    return [
        float(lr)
        for groups in (optimizer.param_groups for optimizer in state.optimizers)
        for lr in of_schedulers.get(id(groups)) or [group.get("initial_lr", group["lr"]) for group in groups]
    ]


def check_optimizers_of(schedulers: tuple[Any, ...], optimizers: Sequence[Optimizer]) -> None:
    """Raise if a scheduler changes the learning rate of an optimizer that does not train."""
    trained = {id(parameter) for parameter in _parameters(optimizers)}
    for scheduler in schedulers:
        optimizer = getattr(scheduler, "optimizer", None) if isinstance(scheduler, LRScheduler) else None
        if isinstance(optimizer, Optimizer) and trained.isdisjoint(map(id, _parameters([optimizer]))):
            raise ValueError(
                f"schedulers holds a {type(scheduler).__name__} of another {type(optimizer).__name__} than the one in "
                "`optimizers`, whose learning rate would never move. Make it from that one."
            )


def _parameters(optimizers: Iterable[Optimizer]) -> Iterator[Any]:
    return (parameter for one in optimizers for group in one.param_groups for parameter in group["params"])


def to_duration(given: int | str | Time[int] | None, name: str) -> Time[int] | None:
    """Return a duration. A plain number counts epochs."""
    if given is None:
        return None
    accepted = "Give epochs ('10ep'), batches ('500ba'), samples ('50000sp') or tokens ('1000000tok')."
    if isinstance(given, bool):
        raise ValueError(f"{name}={given!r} is not a length of training. {accepted}")
    duration = ensure_time(given, TimeUnit.EPOCH)
    if duration.unit is TimeUnit.SECOND:
        raise ValueError(f"{name}={given!r}: Wall clock time not an allowed time unit. {accepted}")
    if duration.unit is TimeUnit.DURATION:
        raise ValueError(f"{name}={given!r} is a fraction of training, not a length. {accepted}")
    if duration.value <= 0:
        raise ValueError(f"{name}={given!r} must be greater than 0. {accepted}")
    return duration


def stay_stopped(state: State, stopped_duration: str | None) -> None:
    """Stop if the loaded checkpoint records that the run was stopped, unless the duration has changed."""
    state.stopped_duration = None
    duration = state.max_duration
    if duration is None or duration.to_timestring() != stopped_duration:
        return
    state.stop_training()
    if get_global_rank() == 0:
        _log.warning(
            "No training: the checkpoint records that the run was stopped after batch %d of max_duration=%r. To "
            "continue, give another max_duration or fit(duration=...). A callback that ends only the job, not the run, "
            "calls state.stop_training(resumable=True).",
            state.timestamp.num_batches,
            stopped_duration,
        )


def log_nothing_left(state: State) -> None:
    if get_global_rank() == 0 and state.max_duration is not None:
        _log.warning(
            "Nothing left to train: %s is at batch %d, and max_duration=%r has been reached. To continue, raise "
            "max_duration or call fit(duration=...).",
            state.load_path,
            state.timestamp.num_batches,
            state.max_duration.to_timestring(),
        )


def check_time_left(state: State) -> None:
    now, max_duration = state.timestamp, state.max_duration
    if max_duration is None:
        raise ValueError(
            "max_duration is a required argument and must be specified when constructing the Trainer or when "
            "calling Trainer.fit(). Give a length of training such as '10ep' or '500ba'."
        )
    asked = max_duration.to_timestring()
    if state.iteration_length is None and max_duration.unit is TimeUnit.ITERATION:
        raise ValueError(
            f"max_duration cannot be specified in iterations ({asked!r}) without a state.iteration_length, such as "
            "'2ep'. Set it, or give epochs ('10ep')."
        )
    if now >= max_duration:
        raise NothingLeftError(
            f"The max_duration {asked} is not beyond the {now.get(max_duration.unit).to_timestring()} trained so far. "
            "Please provide the `duration` or specify `reset_time=True` in Trainer.fit()."
        )


class NothingLeftError(ValueError):
    """The duration of training has been reached before a `fit`."""


@dataclass(frozen=True, slots=True)
class FitSettings:
    """Settings of training that a call of `fit` may change.

    Attributes:
        batches: The batches to train on, or `None` before there is a dataloader.
        microbatching: The microbatching that the user has chosen.
        split: The `microbatching` and the data that the microbatch size on the state was computed for.
        pending: Schedulers that cannot be compiled before a duration and a dataloader are known.
        compiled: The schedulers that were compiled last.
        steps_every_batch: How often schedulers step; see `SchedulerSteps`.
    """

    microbatching: Microbatching
    batches: TrainBatches | None = None
    split: tuple[Microbatching, DataSpec] | None = None
    pending: Schedule | None = None
    compiled: Schedule | None = None
    steps_every_batch: bool | None = True


class FitPlan:
    """Settings of the next fit, from the constructor or earlier fits."""

    def __init__(
        self, state: State, engine: Engine, ranks: Ranks, position: DataPosition, microbatching: Microbatching
    ) -> None:
        self._state = state
        self._engine = engine
        self._ranks = ranks
        self._position = position
        self.settings = FitSettings(microbatching)

    def set_data(self, data_spec: DataSpec, label: str, subset_num_batches: int) -> TrainBatches:
        """Set the data to train on. Every rank must call this."""
        state = self._state
        state.set_dataloader(data_spec.dataloader, label, subset_num_batches)
        share_length(state)
        state.train_dataloader = data_spec.dataloader
        self._set_microbatching(data_spec)
        self._position.sizes = None
        batches = TrainBatches(data_spec, state, self._engine, self._ranks, self._position)
        self.settings = replace(self.settings, batches=batches)
        return batches

    def change_batch_size(self, batch_size: int) -> bool:
        """Change the batch size of each rank, if possible, and return whether it was. Every rank must call this.

        Without a given microbatch size, larger batches are read in microbatches of the size of the former ones.
        """
        batches, state = self.settings.batches, self._state
        if batches is None or state.deepspeed_enabled or self._position.sizes is not None:
            return False
        former, microbatching = batches.data_spec.dataloader, self.settings.microbatching
        loader = with_batch_size(former, batch_size)
        if loader is None:
            return False
        data_spec = copy.copy(batches.data_spec)
        data_spec.dataloader = loader
        length, microbatch_size = state.dataloader_len, state.device_train_microbatch_size
        is_subset = length is not None and int(length) < len(former)
        self.set_data(data_spec, state.dataloader_label or "train", int(length) if length and is_subset else -1)
        if microbatching.size is None and not microbatching.is_auto and microbatch_size is not None:
            state.device_train_microbatch_size = min(batch_size, microbatch_size)
        return True

    def choose_batches(self, dataloader: Any, label: str, subset_num_batches: int | None) -> TrainBatches:
        """Return the batches of a new dataloader, or of the current one."""
        if subset_num_batches is not None:
            check_subset("train_subset_num_batches", subset_num_batches)
        if dataloader is not None:
            subset_num_batches = -1 if subset_num_batches is None else subset_num_batches
            return self.set_data(ensure_data_spec(dataloader), label, subset_num_batches)
        batches = self.settings.batches
        if batches is None:
            raise ValueError(
                "train_dataloader is a required argument and must be specified when constructing the Trainer or when "
                "calling Trainer.fit(). Give an iterable of batches, such as a torch DataLoader."
            )
        self._set_microbatching(batches.data_spec)
        if subset_num_batches is not None:
            self._state.dataloader_len = subset_num_batches
            share_length(self._state)
        return batches

    def _set_microbatching(self, data_spec: DataSpec) -> None:
        """Set the microbatch size on the state, but keep one that 'auto' found for the same setting and data."""
        microbatching = self.settings.microbatching
        if self.settings.split == (microbatching, data_spec):
            return
        state = self._state
        state.device_train_microbatch_size = microbatching.resolve(data_spec)
        state.grad_accum, state.auto_microbatching = microbatching.count, microbatching.is_auto
        self.settings = replace(self.settings, split=(microbatching, data_spec))

    def set_schedule(self, schedule: Schedule, *, begins_now: bool = False) -> None:
        """Compile the schedulers, or keep them until the duration and dataloader that they need are known."""
        state = self._state
        if schedule.schedulers:
            self.settings = replace(self.settings, pending=schedule)
        is_known = state.max_duration is not None and state.dataloader is not None
        pending = self.settings.pending if is_known else None
        self._divide_batches()
        if pending is not None:
            state.max_duration = pending.scale(state.max_duration)
        if begins_now:
            check_time_left(state)  # before compiling, which sets learning rates and cannot be undone
        if pending is not None:
            state.schedulers = pending.compile(state)
            self.settings = replace(
                self.settings, pending=None, compiled=pending, steps_every_batch=pending.every_batch
            )
        if begins_now:  # a load, another duration or a stop has changed the rates since they were set
            SchedulerSteps(state, self.settings.steps_every_batch).set_rates()

    def _divide_batches(self) -> None:
        """Divide the dataloader's batches if there is a schedule of the batch size."""
        batches, schedule = self.settings.batches, self.settings.pending or self.settings.compiled
        if batches is not None and schedule is not None:
            if any(getattr(each, "target", None) == "batch_size" for each in schedule.schedulers):
                batches.divide()
            elif self._position.sizes is not None:
                self._position.sizes.batch_size = self._position.sizes.whole

    def set_optimizers(self, optimizers: Sequence[Optimizer], given: Schedule) -> None:
        """Replace the optimizers. Without given schedulers, the present Composer schedulers continue with them."""
        state = self._state
        state.optimizers = optimizers
        for scheduler in given.schedulers or state.schedulers:
            of = scheduler.optimizer if isinstance(scheduler, LRScheduler) else None
            # By the groups, which a wrapper such as SAM shares with the optimizer of the scheduler.
            is_elsewhere = of is not None and all(of.param_groups is not each.param_groups for each in optimizers)
            if is_elsewhere and (given.schedulers or compiled_for(scheduler) is None):
                raise ValueError(
                    f"fit(optimizers=...) replaces the {type(of).__name__} of a {type(scheduler).__name__}, whose "
                    "learning rate would never move. Give fit(schedulers=...) made from the new optimizers."
                )
        if given.schedulers:
            state.schedulers = None
        elif state.schedulers and self.settings.compiled is not None:
            state.schedulers = self.settings.compiled.compile(state)

    def close(self) -> None:
        """Stop the dataloader's worker processes, which may be persistent or in the middle of an epoch."""
        if self.settings.batches is not None:
            self.settings.batches.restart()
        self._position.close()

    @contextmanager
    def unchanged_on_error(self) -> Generator[None]:
        settings, state = self.settings, self._state
        data = (state.dataloader, state.dataloader_label, state.dataloader_len)
        optimizers, schedulers, sizes = list(state.optimizers), list(state.schedulers), self._position.sizes
        before = (
            state.train_dataloader,
            state.max_duration,
            state.stopped_duration,
            state.timestamp,
            state.device_train_microbatch_size,
            state.grad_accum,
            state.auto_microbatching,
        )
        try:
            yield
        except BaseException:
            self.settings = settings
            (
                state.train_dataloader,
                state.max_duration,
                state.stopped_duration,  # after the duration, whose assignment resets it
                state.timestamp,
                state.device_train_microbatch_size,
                state.grad_accum,
                state.auto_microbatching,
            ) = before
            state.optimizers, state.schedulers, self._position.sizes = optimizers, schedulers, sizes
            restore_dataloader(state, *data)
            raise
