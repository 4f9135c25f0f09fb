"""Express a length in the unit in which a running training counts it."""

from typing import Protocol

from composer_time import Time, Timestamp, TimeUnit

__all__ = ["SchedulerState", "convert_time"]


class SchedulerState(Protocol):
    """What a scheduler reads of the training state. `composer_events.State` has it, and so may any object."""

    @property
    def timestamp(self) -> Timestamp:
        """Where training is."""
        ...

    @property
    def max_duration(self) -> "Time | None":
        """How long training is."""
        ...

    @property
    def dataloader_len(self) -> "Time | None":
        """How many batches an epoch has, `None` when that is not known."""
        ...


def parse_time(value: "str | Time", name: str) -> Time:
    """Turn what a scheduler was given as its argument `name` into a `Time`.

    Raises:
        ValueError: If the string is no time string.
        TypeError: If it is neither a string nor a `Time`.
    """
    if isinstance(value, Time):
        return value
    if isinstance(value, str):
        return Time.from_timestring(value)
    raise TypeError(
        f"{name}={value!r} has no unit. A scheduler needs a number and a unit, such as '10ep', '500ba' or '0.1dur': "
        f"pass a time string or a Time."
    )


def parse_length(value: "str | Time", name: str, *, may_be_zero: bool = False) -> Time:
    """Turn what a scheduler was given as a length into a `Time`; see `parse_time`.

    Raises:
        ValueError: If it is negative, or 0 unless `may_be_zero` is set.
    """
    length = parse_time(value, name)
    if length.value < 0 or (length.value == 0 and not may_be_zero):
        least = "0 or more" if may_be_zero else "more than 0"
        raise ValueError(
            f"{name}={str(length)!r} is not a length that training can last: it must be {least}, such as '500ba'."
        )
    return length


def convert_time(time: "str | Time", state: SchedulerState, ssr: float = 1.0) -> Time:
    """Express `time` in the unit in which the training that `state` describes can count it.

    Epochs become batches, since schedulers move within an epoch. Fractions of the duration become batches where the
    duration is given in epochs, and the unit of the duration otherwise. What is a fraction of the duration is not
    scaled: the duration itself has been scaled already.

    Args:
        time: The length.
        state: Its `max_duration` must be set. Its `dataloader_len` must be known where epochs are to become batches.
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
        # Composer's contract has this class, so it is raised by name: an assert would be gone under `python -O`.
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
        return Time(int(time.value * _batches_per_epoch(time, state) * ssr), TimeUnit.BATCH)
    return time if ssr == 1.0 else Time(int(time.value * ssr), time.unit)


def _part(fraction: float, length: int) -> int:
    # Floats are rounded when they are written and when they are multiplied: 0.29 * 100 is 28.999999999999996.
    return int(fraction * length * (1 + 2**-51))


def _batches_per_epoch(time: Time, state: SchedulerState) -> int:
    """Return the number of batches in an epoch, which `time` is to be multiplied with."""
    if state.dataloader_len is None:
        raise RuntimeError(
            f"{str(time)!r} cannot be converted to batches, because state.dataloader_len is None: the dataloader does "
            f"not say how many batches it has. Give it a length (in a loop of your own, lambda_lr and lr_lambda take "
            f"batches_per_epoch), or write the schedule and max_duration in batches, samples or tokens."
        )
    return int(state.dataloader_len)
