"""Arguments of the wrong kind are named, with what is accepted."""

import math
import re
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from composer_events import arguments
from composer_time import Time, TimeUnit

TAKEN = [
    (arguments.check_flags, {}, [True, False, 0, 1]),
    (arguments.check_flags, {"may_be_none": True}, [None, True]),
    (arguments.check_counts, {}, [1, 10**20]),
    (arguments.check_counts, {"least": -1}, [-1, 0]),
    (arguments.check_numbers, {}, [0, -0.5, math.inf, Fraction(1, 3)]),
    (arguments.check_numbers, {"least": 0}, [0, 0.5]),
    (arguments.check_seconds, {}, [1, 0.5]),
    (arguments.check_seconds, {"may_be_zero": True}, [0, 0.0]),
    (arguments.check_seconds, {"may_be_none": True}, [None, 1]),
    (arguments.check_texts, {}, ["", "a"]),
    (arguments.check_texts, {"may_be_none": True}, [None]),
    (arguments.check_places, {}, ["a", Path("a")]),
    (arguments.check_places, {"may_be_none": True}, [None]),
    (arguments.check_names, {"example": "a.pt"}, ["a", Path("a/b"), None]),
    (arguments.check_text_lists, {}, [None, [], ["a"], ("a", "b"), {"a"}]),
    (arguments.check_mappings, {}, [None, {}, {"a": 1}]),
    (arguments.check_functions, {}, [None, len]),
]
REFUSED = [
    (arguments.check_flags, {}, ["no", None, 2, 0.5], TypeError, "must be True or False"),
    (arguments.check_counts, {}, [True, 1.0, "1", None], TypeError, "must be a whole number, 1 or more"),
    (arguments.check_counts, {"least": 2}, [1, -3], ValueError, "must be 2 or more"),
    (arguments.check_numbers, {}, [True, "1", None, Decimal(1)], TypeError, "must be a number"),
    (arguments.check_numbers, {"least": 0.5}, [0.25, math.nan], ValueError, r"must be a number, 0\.5 or more"),
    (arguments.check_numbers, {}, [math.nan], ValueError, "must be a number"),
    (arguments.check_seconds, {}, [True, "1", None], TypeError, "must be a finite number of seconds, more than 0"),
    (arguments.check_seconds, {}, [0, -1, math.inf, math.nan], ValueError, "of seconds, more than 0"),
    (arguments.check_seconds, {"may_be_zero": True}, [-1], ValueError, "of seconds, 0 or more"),
    (arguments.check_seconds, {"may_be_none": True}, [0], ValueError, "or None to wait as long as it takes"),
    (arguments.check_texts, {}, [None, 1, b"a"], TypeError, "must be a text"),
    (arguments.check_places, {}, [None, 1], TypeError, "must be a text or a path"),
    (arguments.check_names, {"example": "a.pt"}, [1], TypeError, "must be a name such as 'a.pt', or None"),
    (arguments.check_names, {"example": "a.pt"}, ["", "/", Path("/")], ValueError, "is empty, and must be a name"),
    (arguments.check_text_lists, {}, ["a", [1], 1], TypeError, "must be a list of texts"),
    (arguments.check_mappings, {}, [[], "a", {1: 2}], TypeError, "must be a dict whose keys are texts"),
    (arguments.check_functions, {}, ["len"], TypeError, "must be a function, or None"),
]


@pytest.mark.parametrize(("check", "settings", "values"), TAKEN)
def test_what_an_argument_may_be_is_taken(check, settings, values):
    for value in values:
        check(**settings, size=value)


@pytest.mark.parametrize(("check", "settings", "values", "error", "accepted"), REFUSED)
def test_what_it_may_not_be_is_refused_with_its_name_its_value_and_what_is_accepted(
    check, settings, values, error, accepted
):
    for value in values:
        with pytest.raises(error, match=f"^size={re.escape(repr(value))} .*{accepted}"):
            check(**settings, size=value)


@pytest.mark.parametrize("value", ["3ba", Time(3, TimeUnit.BATCH), 3])
def test_a_length_of_training_is_read(value):
    assert arguments.to_time("interval", value, TimeUnit.BATCH) == Time(3, TimeUnit.BATCH)


@pytest.mark.parametrize(
    ("value", "unit", "error"),
    [
        ("soon", TimeUnit.BATCH, ValueError),
        (True, TimeUnit.BATCH, TypeError),
        (None, None, TypeError),
        (3, None, TypeError),
    ],
)
def test_what_is_no_length_of_training_is_refused_by_name(value, unit, error):
    with pytest.raises(error, match=f"^interval={value!r} is not a length of training: "):
        arguments.to_time("interval", value, unit)
