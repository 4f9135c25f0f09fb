"""Conversion of lengths to the units that a training run counts."""

from typing import Protocol

from composer_time import Time, Timestamp, TimeUnit

__all__ = ["SchedulerState", "convert_time"]


class SchedulerState(Protocol):
    """The part of the training state that schedulers read. Any object may have it, as `composer_events.State` does."""

    @property
    def timestamp(self) -> Timestamp:
        """The progress of training."""
        ...

    @property
    def max_duration(self) -> "Time | None":
        """The length of training."""
        ...

    @property
    def dataloader_len(self) -> "Time | None":
        """The number of batches per epoch, or `None` if it is unknown."""
        ...


def parse_time(value: "str | Time", name: str) -> Time:
    """Convert the argument `name` of a scheduler to a `Time`."""
    if isinstance(value, Time):
        return value
    if isinstance(value, str):
        return Time.from_timestring(value)
    raise TypeError(
        f"{name}={value!r} has no unit. A scheduler needs a number and a unit, such as '10ep', '500ba' or '0.1dur': "
        f"pass a time string or a Time."
    )


def parse_length(value: "str | Time", name: str, *, may_be_zero: bool = False) -> Time:
    """Convert an argument of a scheduler that is a length to a `Time`; it must be positive, or 0 if that may be."""
    length = parse_time(value, name)
    if length.value < 0 or (length.value == 0 and not may_be_zero):
        least = "0 or more" if may_be_zero else "more than 0"
        raise ValueError(
            f"{name}={str(length)!r} is not a length that training can last: it must be {least}, such as '500ba'."
        )
    return length


def convert_time(time: "str | Time", state: SchedulerState, ssr: float = 1.0) -> Time:
    """Convert `time` to a unit that the training run of `state` counts.

    Epochs become batches, because schedules change within an epoch. Fractions of the duration become batches if the
    duration is in epochs, otherwise the unit of the duration. They are not scaled, because the duration itself has
    already been scaled.

    Args:
        time: The length.
        state: Its `max_duration` must be set, and its `dataloader_len` known if epochs must be converted to batches.
        ssr: The scale schedule ratio, by which lengths are multiplied.

    Returns:
        The length, rounded down, in batches, samples, tokens or iterations.

    Raises:
        ValueError: If `time` is in seconds.
        RuntimeError: If epochs cannot be converted because the length of the dataloader is unknown.
        AssertionError: If `state.max_duration` is not set.
    """
    time = parse_time(time, "time")
    if state.max_duration is None:
        # Composer documents this class. Raised explicitly, because `python -O` removes assert statements.
        raise AssertionError(
            "state.max_duration=None: a scheduler needs to know how long training is. Set max_duration before the "
            "scheduler is compiled or called."
        )
    if time.unit == TimeUnit.SECOND:
        raise ValueError(
            f"Wall clock time not an allowed time unit. A scheduler got {str(time)!r}; it accepts iterations, epochs, "
            f"batches, samples, tokens and fractions of the duration, such as '10ep', '500ba' or '0.1dur'."
        )
    if time.unit == TimeUnit.DURATION:
        if state.max_duration.unit == TimeUnit.EPOCH:
            num_batches = _batches_per_epoch(time, state) * state.max_duration.value
            return Time(_part(time.value, num_batches), TimeUnit.BATCH)
        return Time(_part(time.value, state.max_duration.value), state.max_duration.unit)
    if time.unit == TimeUnit.EPOCH:
        # One rounding at the end: rounding epochs first could lose most of an epoch.
        return Time(int(time.value * _batches_per_epoch(time, state) * ssr), TimeUnit.BATCH)
    return time if ssr == 1.0 else Time(int(time.value * ssr), time.unit)


def _part(fraction: float, length: int) -> int:
    # Compensates floating point rounding: 0.29 * 100 is 28.999999999999996.
    return int(fraction * length * (1 + 2**-51))


def _batches_per_epoch(time: Time, state: SchedulerState) -> int:
    """Return the number of batches per epoch, needed to convert `time`."""
    if state.dataloader_len is None:
        raise RuntimeError(
            f"{str(time)!r} cannot be converted to batches, because state.dataloader_len is None: the dataloader does "
            f"not say how many batches it has, or a schedule of 'batch_size' changes their number. Give it a length "
            f"(in a loop of your own, lambda_lr and lr_lambda take batches_per_epoch), or write the schedule and "
            f"max_duration in batches, samples or tokens."
        )
    return int(state.dataloader_len)
