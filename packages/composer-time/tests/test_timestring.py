import random
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_time import Time, TimeUnit

SUFFIXES = {unit.value: unit for unit in TimeUnit}
WHOLE_UNITS = [unit for unit in TimeUnit if unit is not TimeUnit.DURATION]

REFUSED = [
    *["", " ", "5", "0", "10", "1e3", "ba10", "ep5"],  # no unit, or not at the end
    *["1Epoch", "10epochs", "1d", "1H", "5ep ", "5ep\n", "10 e p"],  # no such unit
    *["ep", " ep", "dur", ".dur", "h", "hms", "e3ep", "nanep", "nandur", "infep", "-infdur"],  # no number
    *["0x10ep", "1ep2ba", "1 0ep", "- 1ep", "--1ep", "1,5dur", "1.5.0dur", "1e1.5ba"],  # not a number
    *["1__0ep", "_1ep", "1_ep", "1_.0ep"],  # underscores that separate nothing
    *["1e999dur", "-1e999dur", "1e999ba"],  # beyond what a float holds
    *["\u0663ep", "1\u0966ep", "\uff11\uff10ba", "\u0661h", "10\u0435p"],  # digits and letters of other scripts
    *["24h", "60m", "90s", "100s", "1h60m", "001h", "1h 20m", "-1h", "1.5h", "1m1h", "1h1h"],  # no such wall clock
]

finite = st.floats(allow_nan=False, allow_infinity=False)
digits = st.lists(st.text("0123456789", min_size=1, max_size=5), min_size=1, max_size=3).map("_".join)
signs = st.sampled_from(["", "+", "-"])
blanks = st.sampled_from(["", " ", "  ", "\t", "\n"])


@st.composite
def suffixes(draw, units=tuple(TimeUnit)):
    """Draw a unit and its suffix in some mix of cases."""
    unit = draw(st.sampled_from(units))
    upper = draw(st.lists(st.booleans(), min_size=len(unit.value), max_size=len(unit.value)))
    return unit, "".join(c.upper() if up else c for c, up in zip(unit.value, upper, strict=True))


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("1iter", 1, TimeUnit.ITERATION),
        ("10ep", 10, TimeUnit.EPOCH),
        ("500ba", 500, TimeUnit.BATCH),
        ("3e10sp", 30_000_000_000, TimeUnit.SAMPLE),
        ("3_0e10sp", 300_000_000_000, TimeUnit.SAMPLE),
        ("4_00_0tok", 4000, TimeUnit.TOKEN),
        (".5dur", 0.5, TimeUnit.DURATION),
        ("1.5dur", 1.5, TimeUnit.DURATION),
        ("30sec", 30, TimeUnit.SECOND),
        ("-1ep", -1, TimeUnit.EPOCH),
        ("-3ba", -3, TimeUnit.BATCH),
        ("+2ba", 2, TimeUnit.BATCH),
        ("5 ep", 5, TimeUnit.EPOCH),
        (" 5\tep", 5, TimeUnit.EPOCH),
        ("10EP", 10, TimeUnit.EPOCH),
        ("1Ep", 1, TimeUnit.EPOCH),
        ("030.0sp", 30, TimeUnit.SAMPLE),
        ("1.0iter", 1, TimeUnit.ITERATION),
        ("1.ba", 1, TimeUnit.BATCH),
        ("1e3ba", 1000, TimeUnit.BATCH),
        ("15e-1dur", 1.5, TimeUnit.DURATION),
        ("1E3ba", 1000, TimeUnit.BATCH),
        ("0ep", 0, TimeUnit.EPOCH),
        ("9223372036854775808ba", 2**63, TimeUnit.BATCH),
        ("9007199254740993tok", 2**53 + 1, TimeUnit.TOKEN),
        ("1h20m40s", 4840, TimeUnit.SECOND),
        ("1h", 3600, TimeUnit.SECOND),
        ("20m40s", 1240, TimeUnit.SECOND),
        ("1h20s", 3620, TimeUnit.SECOND),
        ("23h59m59s", 86399, TimeUnit.SECOND),
        ("00h00m00s", 0, TimeUnit.SECOND),
    ],
)
def test_a_time_string_reads_as_its_value_and_unit(text, value, unit):
    time = Time.from_timestring(text)
    assert (time.value, time.unit) == (value, unit)
    assert type(time.value) is (float if unit is TimeUnit.DURATION else int)


@pytest.mark.parametrize("text", REFUSED)
def test_text_outside_the_grammar_is_refused_with_the_text_and_the_grammar(text):
    with pytest.raises(ValueError, match="Invalid time string") as caught:
        Time.from_timestring(text)
    message = str(caught.value)
    assert repr(text) in message
    assert "Accepted: a number and a unit, such as '10ep'" in message
    assert "iter, ep, ba, sp, tok, dur, sec" in message
    assert "'1h20m40s'" in message


@pytest.mark.parametrize("text", ["1.1iter", "1.5ep", "2.1ba", "3.2sp", "3.4tok", "0.1sec", "1e-3ba", "-0.5ep"])
def test_a_fraction_of_what_is_counted_whole_is_a_type_error_with_the_grammar(text):
    with pytest.raises(TypeError, match="is a fraction") as caught:
        Time.from_timestring(text)
    assert repr(text) in str(caught.value)
    assert "Accepted: " in str(caught.value)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("10epochs", "it is not a number with a unit"),
        ("90s", "seconds of a wall-clock length go from 0 to 59"),
        ("24h", "hours of a wall-clock length go from 0 to 23"),
        ("1e999ba", "the number is too large"),
    ],
)
def test_the_error_says_what_is_wrong_with_the_text(text, advice):
    with pytest.raises(ValueError, match="Invalid time string") as caught:
        Time.from_timestring(text)
    assert advice in str(caught.value)


@pytest.mark.parametrize("value", [None, 10, 1.5, b"10ep", ["10ep"], {"ep": 10}])
def test_what_is_not_text_is_refused_by_kind(value):
    with pytest.raises(TypeError, match="not a time string"):
        Time.from_timestring(value)
    with pytest.raises(TypeError, match="not a time string"):
        Time.from_timedelta(value)


@pytest.mark.parametrize(("text", "seconds"), [("1h20m40s", 4840), ("5s", 5), ("45m", 2700)])
def test_a_timedelta_is_a_wall_clock_length_in_seconds(text, seconds):
    time = Time.from_timedelta(text)
    assert (time.value, time.unit) == (seconds, TimeUnit.SECOND)


@pytest.mark.parametrize("text", ["", "5", "30sec", "10ep", "60m"])
def test_a_timedelta_takes_no_other_form(text):
    with pytest.raises(ValueError, match=r"Invalid time string .*'1h20m40s'"):
        Time.from_timedelta(text)


def test_endless_text_is_refused_quickly_and_shown_in_part():
    with pytest.raises(ValueError, match="Invalid time string") as caught:
        Time.from_timestring("1" * 1_000_000 + "x")
    assert len(str(caught.value)) < 600


def test_more_digits_than_the_interpreter_converts_are_refused_like_any_bad_text():
    with pytest.raises(ValueError, match="Invalid time string"):
        Time.from_timestring("9" * 10_000 + "ba")


@given(st.integers(), st.sampled_from(WHOLE_UNITS))
def test_whole_lengths_survive_the_trip_through_text(value, unit):
    time = Time(value, unit)
    assert Time.from_timestring(str(time)) == time
    assert Time.from_timestring(time.to_timestring()).value == value


@given(finite)
def test_durations_survive_the_trip_through_text(value):
    time = Time(value, TimeUnit.DURATION)
    assert Time.from_timestring(str(time)) == time


@given(signs, digits, blanks, blanks, suffixes())
def test_whole_numbers_read_exactly_however_they_are_written(sign, number, before, between, suffix):
    unit, word = suffix
    time = Time.from_timestring(f"{before}{sign}{number}{between}{word}")
    assert time.unit is unit
    assert time.value == int(sign + number.replace("_", ""))


@given(signs, digits, digits, st.integers(-30, 30))
def test_durations_read_as_python_reads_the_number(sign, whole, fraction, exponent):
    number = f"{sign}{whole}.{fraction}e{exponent}"
    assert Time.from_timestring(f"{number}dur").value == float(number)


@given(st.integers(0, 10**6), st.integers(0, 9), suffixes(WHOLE_UNITS))
def test_scientific_notation_reads_exactly(mantissa, exponent, suffix):
    unit, word = suffix
    assert Time.from_timestring(f"{mantissa}e{exponent}{word}") == Time(mantissa * 10**exponent, unit)


@given(
    hours=st.integers(0, 23),
    minutes=st.integers(0, 59),
    seconds=st.integers(0, 59),
    parts=st.sampled_from(["hms", "hm", "hs", "ms", "h", "m", "s"]),
)
def test_wall_clock_lengths_add_up(hours, minutes, seconds, parts):
    amounts = {"h": (hours, 3600), "m": (minutes, 60), "s": (seconds, 1)}
    text = "".join(f"{amounts[part][0]}{part}" for part in parts)
    assert Time.from_timestring(text).value == sum(amount * size for amount, size in (amounts[part] for part in parts))


def read_plainly(text):
    """Read a time string the slow way: strptime for wall clocks, str.endswith and float for the rest.

    Returns the value and unit, or the type of the error. `float` is broader than the grammar only in the words it
    knows, 'nan' and 'inf', and in the digits of other scripts, of which the fuzzed alphabet has one.
    """
    if text and text[0].isdigit() and text[-1] in "hms" and text.isascii():
        padded, rest = "", text
        for part in "hms":
            amount, found, behind = rest.partition(part)
            padded += f"{amount}{part}" if found else f"0{part}"
            rest = behind if found else rest
        try:
            clock = datetime.strptime(padded, "%Hh%Mm%Ss") if not rest else None
        except ValueError:
            clock = None
        if clock is not None and not (padded.endswith(("60s", "61s"))) and " " not in padded:
            return clock.hour * 3600 + clock.minute * 60 + clock.second, TimeUnit.SECOND
    for suffix, unit in SUFFIXES.items():
        number = text[: -len(suffix)]
        if text.lower().endswith(suffix) and number.isascii() and not {*"naif"} & {*number.lower()}:
            try:
                value = float(number)
            except ValueError:
                return ValueError
            if value in (float("inf"), float("-inf")):
                return ValueError
            if unit is TimeUnit.DURATION:
                return value, unit
            return (int(value), unit) if value.is_integer() else TypeError
    return ValueError


def outcome(text):
    """Return the value and unit that a text reads as, or the type of the error if that shows the grammar."""
    try:
        time = Time.from_timestring(text)
    except (ValueError, TypeError) as error:
        return type(error) if "Accepted: " in str(error) else error
    return time.value, time.unit


def fuzzed_texts(count):
    """Return texts that are nearly time strings: a few random pieces, mostly with a unit behind them."""
    chance = random.Random(44)
    pieces = [*"01234567890123456789", *".eE-+_ hmsx", "\u0663", "nan", "inf", "epoch", "0x"]
    units = [*SUFFIXES, *SUFFIXES, "EP", "Ba", "s", ""]
    return ["".join(chance.choices(pieces, k=chance.randrange(6))) + chance.choice(units) for _ in range(count)]


def test_any_text_reads_as_it_would_plainly_or_is_refused_with_the_grammar():
    texts = set(fuzzed_texts(30_000))
    assert len(texts) > 10_000
    expected = {text: read_plainly(text) for text in texts}
    assert {ValueError, TypeError} < set(expected.values())  # the texts reach both kinds of refusal, and reading
    assert {text: outcome(text) for text in texts} == expected
