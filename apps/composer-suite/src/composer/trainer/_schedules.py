"""When the learning-rate schedulers step, and how they are built from what the user gave."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from composer_events.iter_helpers import ensure_tuple
from composer_events.state import State
from composer_optim import compile_composer_schedulers
from composer_optim.side_by_side import check_together, compiled_for
from composer_optim.torch_schedulers import check_ratio, scale_pytorch_schedulers
from composer_time import Time, TimeUnit, ensure_time


class SchedulerSteps:
    """Steps the schedulers of the state, all of them after each batch or all after each epoch.

    Where nothing was asked for it is after each epoch if one of them is PyTorch's, which count epochs, else after each
    batch.
    """

    def __init__(self, state: State, every_batch: bool | None) -> None:
        check_together(state.schedulers)
        self._schedulers = state.schedulers  # the same list for life
        self._every_batch = every_batch

    def after_batch(self) -> None:
        """Step the schedulers if they go by batches."""
        if self._schedulers and self._steps_every_batch():
            self._schedulers.step()

    def after_epoch(self) -> None:
        """Step the schedulers if they go by epochs."""
        if not self._steps_every_batch():
            self._schedulers.step()

    def _steps_every_batch(self) -> bool:
        if self._every_batch is not None:
            return self._every_batch
        return all(compiled_for(scheduler) is not None for scheduler in self._schedulers)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedulers that were given, and how they are to be taken.

    Attributes:
        schedulers: In the order given.
        ratio: By how much schedules and duration become longer or shorter.
        every_batch: How often to step; `None` where nothing was asked for, see `SchedulerSteps`.
    """

    schedulers: tuple[Any, ...]
    ratio: float
    every_batch: bool | None

    @classmethod
    def of(cls, schedulers: Any, ratio: float, every_batch: bool | None) -> "Schedule":
        """Check what the user gave.

        Raises:
            TypeError: If something is no scheduler, or the ratio no number.
            ValueError: If a scheduler waits for a loss, one was compiled without another, the ratio is not positive, or
                settings speak of schedulers where there are none.
        """
        given = ensure_tuple(schedulers)
        for scheduler in given:
            _check(scheduler)
        check_together(given)
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
        """Return a length of training, if it is known, made longer or shorter as the schedules are.

        Raises:
            ValueError: If nothing is left of it.
        """
        return duration if duration is None or self.ratio == 1.0 else _scaled(duration, self.ratio)

    def compile(self, state: State) -> list[LRScheduler]:
        """Scale every schedule, and turn all schedulers into PyTorch's. The learning rate becomes what they say.

        Raises:
            ValueError: If a scheduler cannot be scaled, or one was compiled for another state.
        """
        _check_state(self.schedulers, state)
        if not all(isinstance(scheduler, LRScheduler) for scheduler in self.schedulers):
            return compile_composer_schedulers(self.schedulers, state, self.ratio)
        scale_pytorch_schedulers(self.schedulers, self.ratio)
        return list(self.schedulers)


def follow_time_back(state: State) -> None:
    """Set the learning rate to what Composer's schedulers say at a timestamp that was set back.

    PyTorch's stay where they are, since they count their own steps.
    """
    for scheduler in state.schedulers:
        has_moved = scheduler.last_epoch > 0
        if has_moved and compiled_for(scheduler) is not None:
            scheduler.step()  # Composer's ask the state when it is, whatever number of steps PyTorch counts


def _check(scheduler: Any) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            f"schedulers holds a {type(scheduler).__name__}, whose steps need a loss, and the trainer steps schedulers "
            f"without one. Use one that goes by time, or step it in a callback's eval_end."
        )
    if not isinstance(scheduler, LRScheduler) and (not callable(scheduler) or isinstance(scheduler, type)):
        is_class = isinstance(scheduler, type)
        hint = f"Call it: {scheduler.__name__}(...)." if is_class else "Give an object, such as LinearScheduler()."
        raise TypeError(
            f"schedulers holds {scheduler!r}, which is no scheduler of PyTorch or Composer and no function of the "
            f"state. {hint}"
        )


def check_optimizers_of(schedulers: tuple[Any, ...], optimizers: Sequence[Optimizer]) -> None:
    """Refuse a scheduler that moves the learning rate of an optimizer that does not train.

    Raises:
        ValueError: If one of PyTorch's has an optimizer without a parameter of these.
    """
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


def _check_state(schedulers: tuple[Any, ...], state: State) -> None:
    """Refuse a compiled scheduler that would ask a clock which stands still."""
    for scheduler in schedulers:
        if compiled_for(scheduler) not in (None, state):
            raise ValueError(
                f"schedulers holds a {type(scheduler).__name__} that was compiled for another State than the "
                f"trainer's, whose timestamp does not move. Give the Composer scheduler itself, uncompiled."
            )


def _scaled(max_duration: Time[Any], ratio: float) -> Time[Any]:
    scaled = max_duration * ratio
    if scaled.value <= 0:
        raise ValueError(
            f"Scale schedule has reduced the max_duration to 0: scale_schedule_ratio={ratio!r} of "
            f"max_duration={max_duration.to_timestring()!r}. Raise either of them."
        )
    return scaled


def to_duration(given: int | str | Time[int] | None, name: str) -> Time[int] | None:
    """Return a length of training; a bare number counts epochs.

    Raises:
        ValueError: If it cannot be read, is not positive, or is in a unit that training does not count.
    """
    if given is None:
        return None
    accepted = "Give epochs ('10ep'), batches ('500ba'), samples ('50000sp') or tokens ('1000000tok')."
    if isinstance(given, bool):
        raise ValueError(f"{name}={given!r} is no length of training. {accepted}")
    duration = ensure_time(given, TimeUnit.EPOCH)
    if duration.unit is TimeUnit.SECOND:
        raise ValueError(f"{name}={given!r}: Wall clock time not an allowed time unit. {accepted}")
    if duration.unit is TimeUnit.DURATION:
        raise ValueError(f"{name}={given!r} is a part of a training, whose length it cannot be. {accepted}")
    if duration.value <= 0:
        raise ValueError(f"{name}={given!r} must be greater than 0. {accepted}")
    return duration


def check_time_left(state: State) -> None:
    """Refuse to train without a duration, without an end that can be known, or past the end.

    Raises:
        ValueError: In each of these cases.
    """
    now, max_duration = state.timestamp, state.max_duration
    if max_duration is None:
        raise ValueError(
            "max_duration is a required argument and must be specified when constructing the Trainer or when "
            "calling Trainer.fit(). Give a length of training such as '10ep' or '500ba'."
        )
    asked = max_duration.to_timestring()
    if state.dataloader_len is None and max_duration.unit is TimeUnit.EPOCH:
        raise ValueError(
            f"max_duration cannot be specified in epochs ({asked!r}) when the length of train_dataloader is unknown. "
            "Give batches ('500ba'), or train_subset_num_batches."
        )
    if state.iteration_length is None and max_duration.unit is TimeUnit.ITERATION:
        raise ValueError(
            f"max_duration cannot be specified in iterations ({asked!r}) before state.iteration_length says how long "
            "one is, such as '2ep'. Set it, or give epochs ('10ep')."
        )
    if now >= max_duration:
        raise ValueError(
            f"The max_duration {asked} is not beyond the {now.get(max_duration.unit).to_timestring()} trained so far. "
            "Please provide the `duration` or specify `reset_time=True` in Trainer.fit(). A script that may be started "
            "again when its run is over (autoresume=True) asks `if trainer.state.timestamp < "
            "trainer.state.max_duration:` first."
        )
