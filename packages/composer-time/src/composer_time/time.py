"""Lengths of training."""

from __future__ import annotations

import math
import operator
from functools import cache, lru_cache
from reprlib import repr as shortened
from types import GenericAlias

from composer_time.serializable import Serializable
from composer_time.string_enum import StringEnum

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable
    from re import Pattern

__all__ = ["Time", "TimeUnit", "ensure_time"]
if TYPE_CHECKING:
    from typing import Any, Generic, TypeVar

    TValue = TypeVar("TValue", int, float)

    class _Subscriptable(Serializable, Generic[TValue]): ...
else:
    TValue = int | float  # for typing.get_type_hints
    Any = object

    class _Subscriptable(Serializable):
        """Replacement of `typing.Generic`, so that `Time[int]` works without importing typing."""

        __slots__ = ()
        __class_getitem__ = classmethod(GenericAlias)


def _comparison(compare: Callable[[Any, Any], bool]) -> Callable[[Time[Any], Time[Any] | str | float], bool]:
    def method(self: Any, other: object) -> bool:
        value = self._comparable(other)
        return value if value is NotImplemented else compare(self._value, value)

    return method


class Time(_Subscriptable["TValue"]):
    """A length of training: a value and its unit.

    Immutable and hashable. Lengths with the same unit add, subtract and compare, also with a plain number (taken in
    the same unit) and with a time string. Lengths with different units do not, not even with `==`: that raises
    `RuntimeError`, because the number of batches in an epoch is unknown here. Multiplying by a number or by a `'dur'`
    scales a length and truncates it to a whole number; dividing one length by another gives their ratio as a `'dur'`.

    Args:
        value: An `int`; for `TimeUnit.DURATION` any finite number.
        unit: A `TimeUnit`, or its value or name as a string: `'ep'`, `'epoch'`.

    Raises:
        ValueError: If `unit` is not the name of a unit, or a duration is not finite.
        TypeError: If the value of any unit but `TimeUnit.DURATION` is not an `int`.

    Example:
        >>> Time(10, "ep") - 1 == "9ep"
        True
        >>> Time.from_timestring("10ep") * "0.25dur"
        Time(2, TimeUnit.EPOCH)
        >>> str(Time(3, "ba") / Time(4, "ba"))
        '0.75dur'
    """

    __slots__ = ("_unit", "_value")

    _value: TValue
    _unit: TimeUnit

    def __init__(self, value: TValue, unit: TimeUnit | str) -> None:
        # The common case, a member and an int, is accepted without a function call.
        if type(unit) is not TimeUnit:
            unit = TimeUnit(unit)
        if type(value) is not int or unit is TimeUnit.DURATION:
            value = _checked_value(value, unit)
        self._value = value
        self._unit = unit

    @property
    def value(self) -> TValue:
        """The number of units: a `float` for `TimeUnit.DURATION`, otherwise an `int`."""
        return self._value

    @property
    def unit(self) -> TimeUnit:
        """The unit of the value."""
        return self._unit

    @staticmethod
    def from_iteration(iteration: int) -> Time[int]:
        """Return a length in iterations."""
        return Time(iteration, TimeUnit.ITERATION)

    @staticmethod
    def from_epoch(epoch: int) -> Time[int]:
        """Return a length in epochs."""
        return Time(epoch, TimeUnit.EPOCH)

    @staticmethod
    def from_batch(batch: int) -> Time[int]:
        """Return a length in batches."""
        return Time(batch, TimeUnit.BATCH)

    @staticmethod
    def from_sample(sample: int) -> Time[int]:
        """Return a length in samples."""
        return Time(sample, TimeUnit.SAMPLE)

    @staticmethod
    def from_token(token: int) -> Time[int]:
        """Return a length in tokens."""
        return Time(token, TimeUnit.TOKEN)

    @staticmethod
    def from_duration(duration: float) -> Time[float]:
        """Return a fraction of the whole training."""
        return Time(duration, TimeUnit.DURATION)

    @staticmethod
    def from_timedelta(timestring: str) -> Time[int]:
        """Return the seconds in a wall-clock length such as `'1h20m40s'`.

        Raises:
            ValueError: If the text has another form or a part is out of its range.
            TypeError: If it is not a string.
        """
        seconds = _wall_clock_seconds(_text(timestring))
        if seconds is None:
            raise ValueError(
                f"Invalid time string {shortened(timestring)} for a timedelta. Accepted: {WALL_CLOCK_GRAMMAR}."
            )
        return Time(seconds, TimeUnit.SECOND)

    @staticmethod
    def from_timestring(timestring: str) -> Time[Any]:
        """Return the length that a time string describes.

        A time string is a number and a unit (`'10ep'`, `'3e10tok'`, `'0.5dur'`; in any case, with or without blanks
        around the number) or a wall-clock length (`'1h20m40s'`). The result of `str` of a `Time` is parsed to an equal
        one.

        Raises:
            ValueError: If the text does not match the grammar, which the message contains.
            TypeError: If it is not a string, or a fraction of a unit that has only whole values.

        Example:
            >>> Time.from_timestring("1_000ba")
            Time(1000, TimeUnit.BATCH)
            >>> Time.from_timestring("1h20m40s")
            Time(4840, TimeUnit.SECOND)
        """
        return Time(*_parse(_text(timestring)))

    @staticmethod
    def from_input(i: Time[Any] | str | float, default_int_unit: TimeUnit | str | None = None) -> Time[Any]:
        """Convert a `Time`, a time string or a number to a `Time`.

        Args:
            i: A `Time` (returned unchanged), a time string, or a number.
            default_int_unit: The unit of a plain number.

        Raises:
            RuntimeError: If `i` has another type, or is a number without a default unit.
            ValueError: If a string is not a time string.
            TypeError: If a number is a fraction of a unit that has only whole values.
        """
        if isinstance(i, Time):
            return i
        if isinstance(i, str):
            return Time.from_timestring(i)
        if not isinstance(i, (int, float)):  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
            raise RuntimeError(
                f"{i!r} is of type {type(i).__name__} and cannot be read as a Time. Pass a Time. {GRAMMAR}"
            )
        if default_int_unit is None:
            raise RuntimeError(f"{i!r} is a number without a unit. Write the unit, such as '{i}ep'. {GRAMMAR}")
        return Time(i, default_int_unit)

    def to_timestring(self) -> str:
        """Return the text that `from_timestring` parses to an equal length: `'5ep'`, `'0.5dur'`, `'6sec'`."""
        return f"{self._value}{self._unit.value}"

    def __str__(self) -> str:
        return self.to_timestring()

    def __repr__(self) -> str:
        return f"Time({self._value!r}, {self._unit})"

    # By default pickle would store the names of private slots, and restore them without the constructor's checks.
    def __reduce__(self) -> tuple[type[Time[TValue]], tuple[TValue, TimeUnit]]:
        return Time, (self._value, self._unit)

    def __int__(self) -> int:
        return int(self._value)

    def __float__(self) -> float:
        return float(self._value)

    def __hash__(self) -> int:
        return hash((self._value, self._unit))

    def __eq__(self, other: object) -> bool:
        value = self._comparable(other)
        return value if value is NotImplemented else self._value == value

    __lt__ = _comparison(operator.lt)
    __le__ = _comparison(operator.le)
    __gt__ = _comparison(operator.gt)
    __ge__ = _comparison(operator.ge)

    def __add__(self, other: Time[Any] | str | float) -> Time[TValue]:
        return Time(self._value + self._operand(other), self._unit)

    def __radd__(self, other: str | float) -> Time[TValue]:
        return self + other

    def __sub__(self, other: Time[Any] | str | float) -> Time[TValue]:
        return Time(self._value - self._operand(other), self._unit)

    def __rsub__(self, other: str | float) -> Time[TValue]:
        return Time(self._operand(other) - self._value, self._unit)

    def __neg__(self) -> Time[TValue]:
        return Time(-self._value, self._unit)

    def __pos__(self) -> Time[TValue]:
        return self

    def __mod__(self, other: Time[Any] | str | float) -> Time[TValue]:
        return Time(self._value % self._operand(other), self._unit)

    def __mul__(self, other: Time[Any] | str | float) -> Time[Any]:
        if isinstance(other, (int, float)):
            return _truncated(self._value * other, self._unit)
        factor = Time.from_input(other)
        if TimeUnit.DURATION not in (self._unit, factor._unit):
            raise RuntimeError(
                f"{self!r} * {factor!r} is undefined: one side has to be a number or a 'dur'. Multiply by a number, "
                "or by a fraction of training such as '0.5dur'."
            )
        return _truncated(self._value * factor._value, factor._unit if self._unit is TimeUnit.DURATION else self._unit)

    def __rmul__(self, other: str | float) -> Time[Any]:
        return self * other

    def __truediv__(self, other: Time[Any] | str | float) -> Time[Any]:
        if not isinstance(other, (int, float)):
            return Time(self._value / self._operand(other), TimeUnit.DURATION)
        # Truncated toward zero like __mul__, whereas `//` rounds down.
        if isinstance(self._value, int) and isinstance(other, int):
            quotient = abs(self._value) // abs(other)  # exact also from 2**53 on, where floats are not
            return Time(quotient if (self._value < 0) == (other < 0) else -quotient, self._unit)
        return _truncated(self._value / other, self._unit)

    def _operand(self, other: Any) -> Any:
        """Return the value of an operand, which must have the same unit."""
        if type(other) is int:  # the common case, without creating a Time
            return other
        operand = Time.from_input(other, self._unit)
        if operand._unit is not self._unit:
            raise RuntimeError(
                f"{self!r} and {operand!r} are counted in different units, {self._unit.value!r} and "
                f"{operand._unit.value!r}, and cannot be compared or combined. Give both in one unit."
            )
        return operand._value

    def _comparable(self, other: object) -> Any:
        """Return the value of an operand of a comparison, or `NotImplemented` if it cannot be a length."""
        return self._operand(other) if isinstance(other, (Time, str, int, float)) else NotImplemented


if not TYPE_CHECKING:  # read dozens of times per training step; attrgetter avoids a Python call
    Time.value = property(operator.attrgetter("_value"), doc=Time.value.__doc__)
    Time.unit = property(operator.attrgetter("_unit"), doc=Time.unit.__doc__)


def ensure_time(maybe_time: Time[Any] | str | float, int_unit: TimeUnit | str) -> Time[Any]:
    """Convert a `Time`, a time string or a number to a `Time`.

    Args:
        maybe_time: A `Time` (returned unchanged), a time string, or a number.
        int_unit: The unit of a plain number.

    Raises:
        RuntimeError: If `maybe_time` has another type.
        ValueError: If a string is not a time string.
        TypeError: If a number is a fraction of a unit that has only whole values.

    Example:
        >>> ensure_time(3, "ep"), ensure_time("20ba", "ep")
        (Time(3, TimeUnit.EPOCH), Time(20, TimeUnit.BATCH))
    """
    return Time.from_input(maybe_time, int_unit)


def _checked_value(value: Any, unit: TimeUnit) -> Any:
    """Convert the value to the type of its unit: `float` for durations, otherwise `int`."""
    if unit is TimeUnit.DURATION:
        try:
            fraction = float(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"Time value {value!r} is not a number, and 'dur' takes one. {GRAMMAR}") from error
        if not math.isfinite(fraction):
            raise ValueError(f"Time value {value!r} is not a length: a duration has to be finite. {GRAMMAR}")
        return fraction
    if not isinstance(value, int):
        raise TypeError(
            f"Time value {value!r} is of type {type(value).__name__}, and {unit.value!r} has whole values only: it "
            f"takes an int. Convert the value with int(...), or use 'dur'. {GRAMMAR}"
        )
    return int(value)  # converts a bool, whose text would not be a time string


def _truncated(value: float, unit: TimeUnit) -> Time[Any]:
    """Return a length with the value truncated toward zero to the type of its unit."""
    if unit is not TimeUnit.DURATION and isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value!r} is not a length in {unit.value!r}. Scale by a finite number.")
        value = int(value)
    return Time(value, unit)


class TimeUnit(StringEnum):
    """Unit of a length of training.

    A unit can be given by its value or its name, in any case: `TimeUnit('ep')`, `TimeUnit('epoch')`.

    Example:
        >>> TimeUnit("Batch").value
        'ba'
    """

    ITERATION = "iter"
    """A user-defined number of epochs or tokens."""
    EPOCH = "ep"
    """One pass over the training data."""
    BATCH = "ba"
    """The data of one optimizer step."""
    SAMPLE = "sp"
    """One example."""
    TOKEN = "tok"
    """One token."""
    DURATION = "dur"
    """A fraction of the whole training, the only unit with fractional values; 1 is the end."""
    SECOND = "sec"
    """One second of wall-clock time."""


WALL_CLOCK_GRAMMAR = (
    "a wall-clock length, such as '1h20m40s' or '45m' (hours 0-23, minutes 0-59, seconds 0-59, in this order)"
)
GRAMMAR = (
    "Accepted: a number and a unit, such as '10ep', '1_000ba', '3e10tok' or '0.5dur' (units: "
    f"{', '.join(unit.value for unit in TimeUnit)}; a fraction only with dur), or {WALL_CLOCK_GRAMMAR}."
)
_PARTS = (("hours", 24), ("minutes", 60), ("seconds", 60))


@lru_cache(maxsize=256)  # a run compares with the same few strings at every step; bounded, because texts are user input
def _parse(text: str) -> tuple[int | float, TimeUnit]:
    seconds = _wall_clock_seconds(text)
    if seconds is not None:
        return seconds, TimeUnit.SECOND
    match = _patterns()[1].fullmatch(text)
    if match is None:
        raise ValueError(f"Invalid time string {shortened(text)}: it is not a number with a unit. {GRAMMAR}")
    number, unit = match[1], TimeUnit(match[2].lower())
    if unit is not TimeUnit.DURATION:
        try:
            return int(number), unit  # exact also from 2**53 on, where floats are not
        except ValueError:
            pass  # '1e3', '2.0', or more digits than the interpreter converts
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"Invalid time string {shortened(text)}: the number is too large. {GRAMMAR}")
    if unit is TimeUnit.DURATION:
        return value, unit
    if not value.is_integer():
        raise TypeError(
            f"Invalid time string {shortened(text)}: {unit.value!r} must have a whole number, and {shortened(number)} "
            f"is a fraction. {GRAMMAR}"
        )
    return int(value), unit


def _wall_clock_seconds(text: str) -> int | None:
    match = _patterns()[0].fullmatch(text)
    if match is None or not text:
        return None
    total = 0
    for digits, (part, limit) in zip(match.groups(default="0"), _PARTS, strict=True):
        # The length first, since int() refuses texts of thousands of digits.
        if len(digits) > 2 or int(digits) >= limit:
            raise ValueError(
                f"Invalid time string {shortened(text)}: the {part} of a wall-clock length go from 0 to {limit - 1}. "
                f"Carry the rest to the next larger part, or give all of it in seconds, as in '5400sec'. {GRAMMAR}"
            )
        # Hours, minutes and seconds are the digits of a number in base 60.
        total = total * 60 + int(digits)
    return total


@cache
def _patterns() -> tuple[Pattern[str], Pattern[str]]:
    """Return the patterns of a wall-clock length, and of a number with a unit."""
    import re  # lazily, because re and the patterns would be a large part of the import time

    digits = r"\d+(?:_\d+)*"
    number = rf"[+-]?(?:{digits}(?:\.(?:{digits})?)?|\.{digits})(?:e[+-]?{digits})?"
    units = "|".join(unit.value for unit in TimeUnit)
    # re.ASCII: int and float accept the digits of other scripts, but the grammar does not.
    wall_clock = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)
    return wall_clock, re.compile(rf"\s*({number})\s*({units})", re.ASCII | re.IGNORECASE)


def _text(text: Any) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is of type {type(text).__name__}, not a time string. {GRAMMAR}")
    return text
