"""How quickly the average forgets, how often it moves, and when it begins: from what users write to numbers."""

from typing import Any

from composer_algorithms._numbers import check_number
from composer_time import Time, TimeUnit

_COUNTED_UNITS = (TimeUnit.BATCH, TimeUnit.EPOCH)


def averaging_settings(
    half_life: str | Time[Any] | None, smoothing: float | None, update_interval: str | Time[Any] | None
) -> tuple[float, Time[int]]:
    """Return the smoothing of one update, and the interval between updates."""
    if (half_life is None) == (smoothing is None):
        raise ValueError(
            f"half_life={half_life!r} and smoothing={smoothing!r}: pass exactly one of the two, which say the same. "
            f"half_life has a default, so smoothing needs half_life=None beside it."
        )
    if smoothing is not None:
        check_number("smoothing", smoothing, "a weight from 0 to 1, such as 0.999")
        if not 0 <= smoothing <= 1:
            raise ValueError(f"smoothing={smoothing!r} is not a weight: pass a number from 0 to 1, such as 0.999.")
        return float(smoothing), _counted_time("1ba" if update_interval is None else update_interval, "update_interval")
    assert half_life is not None  # one of the two is given
    life = _counted_time(half_life, "half_life")
    interval = Time(1, life.unit) if update_interval is None else _counted_time(update_interval, "update_interval")
    if interval.unit != life.unit:
        raise ValueError(
            f"update_interval={update_interval!r} and half_life={half_life!r} are in different units: give both in "
            f"batches ('10ba') or both in epochs ('1ep')."
        )
    return 2 ** -(interval.value / life.value), interval


def start_time(ema_start: str | Time[Any]) -> Time[Any]:
    """Return when the average begins."""
    start = _parsed(ema_start, "ema_start", "'0.7dur', '500ba' or '2ep'")
    if start.unit not in (*_COUNTED_UNITS, TimeUnit.DURATION) or start.value < 0:
        raise ValueError(
            f"ema_start={ema_start!r} is no time to begin at: pass batches ('500ba'), epochs ('2ep') or a part of the "
            f"training's length ('0.7dur')."
        )
    return start


def _counted_time(value: object, argument: str) -> Time[int]:
    time = _parsed(value, argument, "'10ba' or '1ep'")
    if time.unit not in _COUNTED_UNITS or time.value <= 0:
        raise ValueError(f"{argument}={value!r} cannot be counted: pass at least one batch ('10ba') or epoch ('1ep').")
    return time


def _parsed(value: object, argument: str, examples: str) -> Time[Any]:
    if isinstance(value, Time):
        return value
    if isinstance(value, str):
        try:
            return Time.from_timestring(value)
        except ValueError as error:
            raise ValueError(f"{argument}={value!r} is no time: {error}") from error
    raise ValueError(f"{argument}={value!r} has no unit: pass a time string such as {examples}.")
