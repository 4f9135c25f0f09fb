"""What a Timestamp holds, with the checks on what it is given."""

from __future__ import annotations

from datetime import timedelta

from composer_time.time import Time
from composer_time.time_unit import TimeUnit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypedDict

    class Fields(TypedDict, total=False):
        """The arguments of a Timestamp's constructor, all of them optional."""

        iteration: int | Time[int] | str | None
        epoch: int | Time[int] | str | None
        batch: int | Time[int] | str | None
        sample: int | Time[int] | str | None
        token: int | Time[int] | str | None
        epoch_in_iteration: int | Time[int] | str | None
        token_in_iteration: int | Time[int] | str | None
        batch_in_epoch: int | Time[int] | str | None
        sample_in_epoch: int | Time[int] | str | None
        token_in_epoch: int | Time[int] | str | None
        total_wct: timedelta | None
        iteration_wct: timedelta | None
        epoch_wct: timedelta | None
        batch_wct: timedelta | None


COUNTERS = {
    "iteration": TimeUnit.ITERATION,
    "epoch": TimeUnit.EPOCH,
    "batch": TimeUnit.BATCH,
    "sample": TimeUnit.SAMPLE,
    "token": TimeUnit.TOKEN,
    "epoch_in_iteration": TimeUnit.EPOCH,
    "token_in_iteration": TimeUnit.TOKEN,
    "batch_in_epoch": TimeUnit.BATCH,
    "sample_in_epoch": TimeUnit.SAMPLE,
    "token_in_epoch": TimeUnit.TOKEN,
}
CLOCKS = ("total_wct", "iteration_wct", "epoch_wct", "batch_wct")
REQUIRED = ("epoch", "batch", "sample", "token", "batch_in_epoch", "sample_in_epoch", "token_in_epoch")
NO_TIME = timedelta(0)


def plain_count(name: str, count: int | Time[int] | str, unit: TimeUnit) -> int:
    """Return the plain number behind what was given for a counter.

    Raises:
        ValueError: If it is counted in another unit or is not a time string.
        TypeError: If it is of another kind.
    """
    if type(count) is int:
        return count
    if not isinstance(count, (int, Time, str)):  # pyright: ignore[reportUnnecessaryIsInstance]  # users pass anything
        raise TypeError(
            f"{name}={count!r} is of type {type(count).__name__}. A Timestamp counts with an int, a Time or a time "
            f"string such as '10{unit.value}'. Convert numbers of other kinds with int(...)."
        )
    time = Time.from_input(count, unit)
    if time.unit is not unit:
        raise ValueError(
            f"{name}={count!r} is counted in {time.unit.value!r}, and a Timestamp counts it in {unit.value!r}. Pass "
            f"an int or a length such as '10{unit.value}'."
        )
    return time.value


def checked_clock(name: str, duration: timedelta) -> timedelta:
    """Return the duration if it is one.

    Raises:
        TypeError: If it is not a `timedelta`.
    """
    if not isinstance(duration, timedelta):  # pyright: ignore[reportUnnecessaryIsInstance]  # users pass anything
        raise TypeError(
            f"{name}={duration!r} is of type {type(duration).__name__}, not a datetime.timedelta. Pass one, such as "
            "datetime.timedelta(seconds=1.5)."
        )
    return duration


def checked_state(state: dict[str, Any]) -> dict[str, int | timedelta]:
    """Return the fields that a saved state has, as plain values.

    Raises:
        KeyError: If a counter that was always saved is missing.
        ValueError: If a counter is in another unit.
        TypeError: If an entry is of the wrong kind.
    """
    missing = [name for name in REQUIRED if name not in state]
    if missing:
        raise KeyError(
            f"the state of a Timestamp lacks {', '.join(missing)}; it has {sorted(state)}. Pass what "
            "Timestamp.state_dict() returned."
        )
    counters = {name: plain_count(name, state[name], unit) for name, unit in COUNTERS.items() if name in state}
    clocks = {name: checked_clock(name, state[name]) for name in CLOCKS if name in state}
    return {**counters, **clocks}
