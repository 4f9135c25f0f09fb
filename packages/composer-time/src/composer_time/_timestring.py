"""The grammar of time strings: from text such as '10ep' or '1h30m' to a value and a unit."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from reprlib import repr as shortened

from composer_time.time_unit import TimeUnit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from re import Pattern

WALL_CLOCK_GRAMMAR = (
    "a wall-clock length, such as '1h20m40s' or '45m' (hours 0-23, minutes 0-59, seconds 0-59, in this order)"
)
GRAMMAR = (
    "Accepted: a number and a unit, such as '10ep', '1_000ba', '3e10tok' or '0.5dur' (units: "
    f"{', '.join(unit.value for unit in TimeUnit)}; a fraction only with dur), or {WALL_CLOCK_GRAMMAR}."
)
_PARTS = (("hours", 24), ("minutes", 60), ("seconds", 60))


def parse_timestring(text: str) -> tuple[int | float, TimeUnit]:
    """Return the value and the unit that a time string stands for.

    Raises:
        ValueError: If the text is outside the grammar or the number is too large.
        TypeError: If it is not a string, or a unit that counts whole things has a fraction.
    """
    _require_text(text)
    return _parse(text)


def parse_wall_clock(text: str) -> int:
    """Return the seconds in a wall-clock length such as '1h20m40s'.

    Raises:
        ValueError: If the text is of another form, or a part is out of its range as in '90s'.
        TypeError: If it is not a string.
    """
    _require_text(text)
    seconds = _wall_clock_seconds(text)
    if seconds is None:
        raise ValueError(f"Invalid time string {shortened(text)} for a timedelta. Accepted: {WALL_CLOCK_GRAMMAR}.")
    return seconds


@lru_cache(maxsize=256)  # a run compares with the same few strings at every step; bounded, since anybody writes them
def _parse(text: str) -> tuple[int | float, TimeUnit]:
    seconds = _wall_clock_seconds(text)
    if seconds is not None:
        return seconds, TimeUnit.SECOND
    match = _number_and_unit().fullmatch(text)
    if match is None:
        raise ValueError(f"Invalid time string {shortened(text)}: {_fault(text)}. {GRAMMAR}")
    number, unit = match[1], TimeUnit(match[2].lower())
    if unit is not TimeUnit.DURATION:
        try:
            return int(number), unit  # exact where a float is not, from 2**53 on
        except ValueError:
            pass  # '1e3', '2.0', or more digits than the interpreter converts
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"Invalid time string {shortened(text)}: the number is too large. {GRAMMAR}")
    if unit is TimeUnit.DURATION:
        return value, unit
    if not value.is_integer():
        raise TypeError(
            f"Invalid time string {shortened(text)}: {unit.value!r} counts whole things and {shortened(number)} is a "
            f"fraction. {GRAMMAR}"
        )
    return int(value), unit


def _wall_clock_seconds(text: str) -> int | None:
    match = _wall_clock().fullmatch(text)
    if match is None or not text:
        return None
    total = 0
    for digits, (part, limit) in zip(match.groups(default="0"), _PARTS, strict=True):
        if len(digits) > 2 or int(digits) >= limit:
            raise ValueError(
                f"Invalid time string {shortened(text)}: the {part} of a wall-clock length go from 0 to {limit - 1}. "
                f"Carry the rest to the next larger part, or give all of it in seconds, as in '5400sec'. {GRAMMAR}"
            )
        total = total * 60 + int(digits)
    return total


@cache
def _wall_clock() -> Pattern[str]:
    import re  # at the first time string, since re and the two patterns would be a good part of the import time

    return re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)


@cache
def _number_and_unit() -> Pattern[str]:
    import re  # as above

    digits = r"\d+(?:_\d+)*"
    number = rf"[+-]?(?:{digits}(?:\.(?:{digits})?)?|\.{digits})(?:e[+-]?{digits})?"
    units = "|".join(unit.value for unit in TimeUnit)
    # ASCII: int and float would take the digits of other scripts too, but those are no part of the grammar.
    return re.compile(rf"\s*({number})\s*({units})", re.ASCII | re.IGNORECASE)


def _require_text(text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is of type {type(text).__name__}, not a time string. {GRAMMAR}")


def _fault(text: str) -> str:
    """Say in one clause what is wrong with text that does not fit the grammar."""
    number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    word = text[len(number) :].lower()
    if not text.strip():
        return "it is empty"
    if not word:
        return "it does not end with a unit"
    if not number.strip():
        return "it does not begin with a number"
    if word in {unit.value for unit in TimeUnit}:
        return f"{shortened(number)} is not a number"
    return f"{shortened(word)} is not a unit{_suggestion(word)}"


def _suggestion(word: str) -> str:
    """Name the unit that a misspelt one was probably meant to be."""
    from difflib import get_close_matches  # on the way to an error only

    units = {spelling: unit.value for unit in TimeUnit for spelling in (unit.value, unit.name.lower())}
    units["step"] = TimeUnit.BATCH.value  # elsewhere the word for what one optimizer step sees
    close = get_close_matches(word[:20], units, n=1)
    return f" (did you mean {units[close[0]]!r}?)" if close else ""
