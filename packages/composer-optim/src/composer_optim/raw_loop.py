"""Schedulers in any training loop, as PyTorch's `LambdaLR`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from composer_optim.compile import ratio_argument
from composer_optim.time_conversion import parse_length
from composer_time import Time, Timestamp, TimeUnit
from composer_time.timestamp import CLOCKS, COUNTERS

__all__ = ["lr_lambda", "lambda_lr"]


def lr_lambda(
    scheduler: Callable[..., float],
    *,
    max_duration: str | Time,
    batches_per_epoch: int | None = None,
    samples_per_batch: int | None = None,
    tokens_per_batch: int | None = None,
    scale_schedule_ratio: float = 1.0,
) -> Callable[[int], float]:
    """Convert a scheduler to a function of the number of completed batches, as `LambdaLR` expects it.

    The result has no state, so it can also be evaluated for the whole schedule at once. It can be pickled if the
    scheduler can.

    Args:
        scheduler: Any scheduler of this package, or a callable `(state)` or `(state, ssr)`.
        max_duration: The length of training.
        batches_per_epoch: Required if any length is in epochs.
        samples_per_batch: Over all ranks; required if any length is in samples.
        tokens_per_batch: Over all ranks; required if any length is in tokens.
        scale_schedule_ratio: Factor of the length of `max_duration` and the schedule.

    Returns:
        A function from the number of completed batches to the factor of the learning rate. It raises `ValueError` or
        `RuntimeError` if the scheduler uses a unit for which no argument above was given, even if it only reads the
        clock, as in `state.timestamp >= '1ep'` or `state.timestamp.epoch`.

    Raises:
        ValueError: If a count or the ratio is not more than 0, `max_duration` has a unit that the loop does not count
            or is scaled to 0, or the ratio is not 1 and the scheduler does not accept one.

    Example:
        >>> from composer_optim import MultiStepScheduler
        >>> factor = lr_lambda(MultiStepScheduler(["0.5dur", "0.75dur"]), max_duration="2ep", batches_per_epoch=4)
        >>> [round(factor(batch), 3) for batch in range(8)]
        [1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    """
    ratio = ratio_argument(scheduler, scale_schedule_ratio)
    duration = parse_length(max_duration, "max_duration")
    scaled = duration if scale_schedule_ratio == 1.0 else duration * scale_schedule_ratio
    if scaled.value == 0:
        raise ValueError(
            f"Scale schedule has reduced the max_duration to 0: max_duration={str(duration)!r} with "
            f"scale_schedule_ratio={scale_schedule_ratio!r}. Use a larger ratio, or give max_duration in batches."
        )
    loop = _Loop(scaled, batches_per_epoch, samples_per_batch, tokens_per_batch)
    # Not a closure, which could not be pickled.
    return partial(_factor, scheduler, ratio, loop)


def lambda_lr(optimizer: Optimizer, scheduler: Callable[..., float], **settings: Any) -> LambdaLR:
    """Create a `LambdaLR` that sets the optimizer's learning rate by `scheduler`, one batch for each `step()`.

    Call `step()` after every `optimizer.step()`, also within epochs: batch `k`, counted from 0, then trains with the
    scheduler's factor for `k` completed batches. The number of completed batches is its only state, so its `state_dict`
    is plain and a run resumes from it together with the optimizer's. Create both before loading either: creating a
    `LambdaLR` sets the optimizer's learning rate to that of batch 0, even over one that was loaded before.

    Args:
        optimizer: The optimizer. Its learning rates are multiplied by the factor.
        scheduler: Any scheduler of this package, or a callable `(state)` or `(state, ssr)`.
        **settings: Keyword arguments of `lr_lambda`, of which `max_duration` is required.

    Raises:
        ValueError: As `lr_lambda`, and also if the scheduler uses a unit for which no argument was given.
        RuntimeError: If the scheduler uses epochs, or fractions of a `max_duration` in epochs, without
            `batches_per_epoch`.

    Example:
        >>> import torch
        >>> from composer_optim import LinearScheduler
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
        >>> schedule = lambda_lr(optimizer, LinearScheduler(), max_duration="4ba")
        >>> for _ in range(3):
        ...     optimizer.step()
        ...     schedule.step()
        >>> schedule.get_last_lr()
        [0.5]
    """
    return LambdaLR(optimizer, lr_lambda(scheduler, **settings))


_COUNTS = {
    TimeUnit.EPOCH: "batches_per_epoch",
    TimeUnit.SAMPLE: "samples_per_batch",
    TimeUnit.TOKEN: "tokens_per_batch",
}


@dataclass(frozen=True)
class _Loop:
    """Counts of a training loop."""

    max_duration: Time
    batches_per_epoch: int | None
    samples_per_batch: int | None
    tokens_per_batch: int | None

    def __post_init__(self) -> None:
        for name in _COUNTS.values():
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name}={count!r} must be 1 or more. Leave it out if it is not known.")
        # A length in epochs needs no count until it is converted to batches, which requires the length of an epoch.
        if self.max_duration.unit != TimeUnit.EPOCH:
            self.require(self.max_duration.unit)

    def require(self, unit: TimeUnit) -> None:
        """Raise `ValueError` if the loop does not count `unit`."""
        if unit == TimeUnit.BATCH:
            return
        argument = _COUNTS.get(unit)
        if argument is None:
            raise ValueError(f"{unit.value!r} is not counted by this loop. Write the lengths in batches.")
        if getattr(self, argument) is None:
            raise ValueError(
                f"{argument}=None, but the schedule or max_duration is counted in {unit.value!r}. Pass {argument}, or "
                f"write the lengths in batches or as fractions of the duration such as '0.1dur'."
            )


@dataclass(frozen=True)
class _LoopState:
    """The state that a scheduler reads after a number of batches."""

    timestamp: Timestamp
    max_duration: Time
    dataloader_len: Time | None


class _LoopTimestamp(Timestamp):
    """Timestamp that raises an error for counters of units that the loop does not count, instead of returning 0."""

    __slots__ = ("loop",)

    def __init__(self, loop: _Loop, batch: int) -> None:
        epoch, batch_in_epoch = divmod(batch, loop.batches_per_epoch) if loop.batches_per_epoch else (0, batch)
        samples, tokens = loop.samples_per_batch or 0, loop.tokens_per_batch or 0
        super().__init__(
            epoch=epoch,
            batch=batch,
            sample=batch * samples,
            token=batch * tokens,
            epoch_in_iteration=epoch,
            token_in_iteration=batch * tokens,
            batch_in_epoch=batch_in_epoch,
            sample_in_epoch=batch_in_epoch * samples,
            token_in_epoch=batch_in_epoch * tokens,
        )
        self.loop = loop

    # Not `__getattr__`, which Python calls only for attributes that do not exist.
    def __getattribute__(self, name: str) -> Any:
        for unit in _NEEDS.get(name, ()):
            self.loop.require(unit)
        return super().__getattribute__(name)

    def _reading(self, unit: TimeUnit) -> int:  # read by `get` and by comparisons with a length
        self.loop.require(unit)
        return super()._reading(unit)


# Units that must be counted for a property of the timestamp to be meaningful; `batch` always is.
_NEEDS = {
    **{name: (TimeUnit.EPOCH, unit) if name.endswith("_in_epoch") else (unit,) for name, unit in COUNTERS.items()},
    **dict.fromkeys(CLOCKS, (TimeUnit.SECOND,)),
}


def _factor(scheduler: Callable[..., float], ratio: tuple[float, ...], loop: _Loop, batch: int) -> float:
    """Call the scheduler in the state after `batch` completed batches."""
    dataloader_len = None if loop.batches_per_epoch is None else Time(loop.batches_per_epoch, TimeUnit.BATCH)
    return scheduler(_LoopState(_LoopTimestamp(loop, batch), loop.max_duration, dataloader_len), *ratio)
