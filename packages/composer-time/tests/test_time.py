import copy
import math
import operator
import pickle
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from composer_time import Time, TimeUnit, ensure_time

WHOLE_UNITS = [unit for unit in TimeUnit if unit is not TimeUnit.DURATION]

units = st.sampled_from(list(TimeUnit))
whole_units = st.sampled_from(WHOLE_UNITS)
fractions = st.floats(-1e12, 1e12, allow_nan=False)
times = st.one_of(
    st.builds(Time, st.integers(), whole_units),
    st.builds(Time, fractions, st.just(TimeUnit.DURATION)),
)
ORDERINGS = [operator.lt, operator.le, operator.gt, operator.ge]
COMPARISONS = [operator.eq, operator.ne, *ORDERINGS]


def whole(value):
    return Time(value, TimeUnit.BATCH)


# What a Time is


def test_the_units_are_these_in_this_order():
    expected = "ITERATION=iter EPOCH=ep BATCH=ba SAMPLE=sp TOKEN=tok DURATION=dur SECOND=sec"
    assert " ".join(f"{unit.name}={unit.value}" for unit in TimeUnit) == expected


@pytest.mark.parametrize("unit", [TimeUnit.EPOCH, "ep", "EP", "epoch", "Epoch"])
def test_the_unit_can_be_a_member_its_value_or_its_name(unit):
    assert Time(10, unit).unit is TimeUnit.EPOCH


def test_an_unknown_unit_is_refused_with_the_units():
    with pytest.raises(ValueError, match=r"'epochs' is not a TimeUnit\. Accepted, in any case: 'iter', 'iteration'"):
        Time(10, "epochs")


@pytest.mark.parametrize("unit", WHOLE_UNITS)
@pytest.mark.parametrize("value", [1.0, 1.5, "1", None, Fraction(1), 1j])
def test_a_unit_that_is_counted_takes_only_an_int(value, unit):
    with pytest.raises(TypeError, match="it takes an int") as caught:
        Time(value, unit)
    assert repr(value) in str(caught.value)
    assert "Accepted: a number and a unit" in str(caught.value)


def test_a_bool_counts_as_the_int_that_it_is():
    assert str(Time(True, "ep")) == "1ep"


@pytest.mark.parametrize("value", [1, 0.5, True, Fraction(1, 2)])
def test_a_duration_is_kept_as_a_float(value):
    time = Time(value, "dur")
    assert type(time.value) is float
    assert time.value == float(value)


@pytest.mark.parametrize(("value", "error"), [(None, TypeError), ([1], TypeError), ("half", ValueError)])
def test_a_duration_has_to_be_a_number(value, error):
    with pytest.raises(error, match=r"is not a number, and 'dur' takes one\. Accepted: "):
        Time(value, "dur")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_duration_has_to_be_finite(value):
    with pytest.raises(ValueError, match=f"{value!r} is not a length: .* finite"):
        Time(value, TimeUnit.DURATION)


@pytest.mark.parametrize(
    ("build", "value", "unit"),
    [
        (Time.from_iteration, 1, TimeUnit.ITERATION),
        (Time.from_epoch, 2, TimeUnit.EPOCH),
        (Time.from_batch, 3, TimeUnit.BATCH),
        (Time.from_sample, 4, TimeUnit.SAMPLE),
        (Time.from_token, 5, TimeUnit.TOKEN),
        (Time.from_duration, 0.5, TimeUnit.DURATION),
    ],
)
def test_each_unit_but_seconds_has_a_constructor(build, value, unit):
    time = build(value)
    assert (time.value, time.unit) == (value, unit)


@pytest.mark.parametrize("name", ["value", "unit"])
def test_a_time_cannot_be_changed(name):
    time = Time(1, "ep")
    with pytest.raises(AttributeError):
        setattr(time, name, 2)
    with pytest.raises(AttributeError):
        time.new_attribute = 1


@pytest.mark.parametrize(
    ("time", "text"), [(Time(5, "ep"), "5ep"), (Time(0.5, "dur"), "0.5dur"), (Time(6, "sec"), "6sec")]
)
def test_text_and_repr_show_value_and_unit(time, text):
    assert str(time) == time.to_timestring() == f"{time}" == text
    assert repr(time) == f"Time({time.value}, TimeUnit.{time.unit.name})"


@given(times)
def test_the_repr_evaluates_to_an_equal_time(time):
    assert eval(repr(time)) == time


@given(times)
def test_equal_times_have_equal_hashes(time):
    twin = Time(time.value, time.unit.value)
    assert twin == time
    assert hash(twin) == hash(time)
    assert {time: "found"}[twin] == "found"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_time_survives_pickling(protocol):
    time = Time(0.25, "dur")
    assert pickle.loads(pickle.dumps(time, protocol)) == time


def test_a_time_survives_copying():
    assert copy.copy(Time(3, "ba")) == copy.deepcopy(Time(3, "ba")) == Time(3, "ba")


def test_the_class_can_be_subscripted_for_annotations():
    assert Time[int](3, "ep") == Time(3, "ep")
    assert str(Time[float]).endswith("Time[float]")


def test_int_and_float_give_the_value():
    assert int(Time(7, "ba")) == 7
    assert float(Time(7, "ba")) == 7.0
    assert type(float(Time(7, "ba"))) is float
    assert int(Time(1.75, "dur")) == 1
    assert (math.floor(Time(1.75, "dur")), math.ceil(Time(1.75, "dur"))) == (1, 2)


def test_a_length_of_zero_is_true_like_any_other():
    assert Time(0, "ep")


@pytest.mark.parametrize("operation", [abs, lambda t: t // 2, lambda t: divmod(t, 2), lambda t: t**2, lambda t: 10 / t])
def test_what_has_no_meaning_for_lengths_is_a_type_error(operation):
    with pytest.raises(TypeError):
        operation(Time(5, "ep"))


# What stands for a Time


@pytest.mark.parametrize("convert", [ensure_time, Time.from_input])
def test_times_text_and_numbers_become_times(convert):
    time = Time(3, "ba")
    assert convert(time, TimeUnit.EPOCH) is time
    assert convert("3ba", TimeUnit.EPOCH) == time
    assert convert(3, TimeUnit.EPOCH) == Time(3, "ep")
    assert convert(3, "sample") == Time(3, "sp")
    assert convert(0.5, "dur") == Time(0.5, "dur")


def test_text_and_times_need_no_default_unit():
    assert Time.from_input("3ba") == Time.from_input(Time(3, "ba")) == Time(3, "ba")


@pytest.mark.parametrize("number", [3, 0.5])
def test_a_number_without_a_unit_is_refused_with_the_grammar(number):
    with pytest.raises(RuntimeError, match=r"number without a unit.* Accepted: a number and a unit"):
        Time.from_input(number)


@pytest.mark.parametrize("value", [None, [3], (3, "ep"), b"3ep", TimeUnit.EPOCH])
def test_what_cannot_stand_for_a_time_is_refused_with_the_grammar(value):
    with pytest.raises(RuntimeError, match=r"cannot be read as a Time.* Accepted: a number and a unit"):
        ensure_time(value, "ep")


def test_a_fraction_of_a_counted_unit_is_a_type_error():
    with pytest.raises(TypeError, match="it takes an int"):
        ensure_time(1.5, "ep")


# Arithmetic


@given(st.integers(), st.integers(), whole_units)
def test_lengths_add_and_subtract_as_their_values_do(a, b, unit):
    assert Time(a, unit) + Time(b, unit) == Time(a + b, unit)
    assert Time(a, unit) - Time(b, unit) == Time(a - b, unit)
    assert -Time(a, unit) == Time(-a, unit)
    assert +Time(a, unit) == Time(a, unit)


@given(st.integers(), st.integers(), whole_units)
def test_numbers_and_text_stand_for_lengths_on_either_side(a, b, unit):
    expected_sum, expected_difference = Time(a + b, unit), Time(a - b, unit)
    text = f"{b}{unit.value}"
    assert Time(a, unit) + b == b + Time(a, unit) == Time(a, unit) + text == text + Time(a, unit) == expected_sum
    assert Time(a, unit) - b == Time(a, unit) - text == expected_difference
    assert b - Time(a, unit) == text - Time(a, unit) == -expected_difference


@given(st.lists(st.integers(), min_size=1), whole_units)
def test_sum_adds_lengths(values, unit):
    assert sum(Time(value, unit) for value in values) == Time(sum(values), unit)


@given(st.integers(), st.integers().filter(bool), whole_units)
def test_the_remainder_is_that_of_the_values(a, b, unit):
    assert Time(a, unit) % Time(b, unit) == Time(a, unit) % b == Time(a % b, unit)


@given(st.integers(), st.integers().filter(bool), whole_units)
def test_dividing_by_a_number_cuts_towards_zero(value, divisor, unit):
    assert Time(value, unit) / divisor == Time(math.trunc(Fraction(value, divisor)), unit)


@given(st.integers(-(2**50), 2**50), st.integers(-(2**50), 2**50).filter(bool))
def test_multiplying_then_dividing_by_an_int_gives_the_length_back(value, factor):
    assert whole(value) * factor / factor == whole(value)


@given(st.integers(-(10**9), 10**9), st.floats(-1e6, 1e6, allow_nan=False))
def test_scaling_by_a_fraction_cuts_towards_zero(value, factor):
    expected = whole(math.trunc(value * factor))
    assert whole(value) * factor == factor * whole(value) == expected
    assert whole(value) * Time(factor, "dur") == Time(factor, "dur") * whole(value) == expected
    assert whole(value) * f"{factor!r}dur" == f"{factor!r}dur" * whole(value) == expected


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9).filter(bool), whole_units)
def test_the_ratio_of_two_lengths_is_a_duration(a, b, unit):
    ratio = Time(a, unit) / Time(b, unit)
    assert (ratio.value, ratio.unit) == (a / b, TimeUnit.DURATION)
    assert Time(a, unit) / f"{b}{unit.value}" == ratio


@given(fractions, fractions)
def test_durations_calculate_as_floats(a, b):
    first, second = Time(a, "dur"), Time(b, "dur")
    assert (first + second).value == a + b
    assert (first - second).value == a - b
    assert (first * second).value == (first * b).value == a * b
    assume(b != 0 and math.isfinite(a / b))
    assert (first / second).value == (first / b).value == a / b
    assert (first % second).value == a % b


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (lambda: Time(5, "ep") / 2, "2ep"),
        (lambda: Time(-5, "ep") / 2, "-2ep"),
        (lambda: 0.5 * Time(2, "ep"), "1ep"),
        (lambda: 3 - Time(1, "ep"), "2ep"),
        (lambda: Time(10, "ba") * "0.25dur", "2ba"),
        (lambda: Time(3, "ba") / Time(4, "ba"), "0.75dur"),
        (lambda: Time(2**60 + 1, "tok") / 1, f"{2**60 + 1}tok"),
    ],
)
def test_a_result_has_the_unit_and_type_of_its_kind(result, expected):
    assert str(result()) == expected


MIXED = [operator.add, operator.sub, operator.mod, operator.truediv, *COMPARISONS]


@pytest.mark.parametrize("operation", MIXED)
@pytest.mark.parametrize("other", [Time(2, "ba"), "2ba", Time(0.5, "dur"), "1h"])
def test_lengths_of_different_units_do_not_mix(operation, other):
    with pytest.raises(RuntimeError, match="different units") as caught:
        operation(Time(1, "ep"), other)
    assert "Time(1, TimeUnit.EPOCH)" in str(caught.value)


@pytest.mark.parametrize("other", [Time(1, "ep"), Time(1, "ba"), "1ep", "1ba"])
def test_a_product_needs_a_number_or_a_duration(other):
    with pytest.raises(RuntimeError, match="has to be a number or a 'dur'"):
        Time(1, "ep") * other


@pytest.mark.parametrize("operation", [operator.add, operator.sub, operator.mod, operator.mul, operator.truediv])
def test_calculating_with_what_is_not_a_length_shows_the_grammar(operation):
    with pytest.raises(RuntimeError, match=r"None .*cannot be read as a Time.* Accepted: "):
        operation(Time(1, "ep"), None)


@pytest.mark.parametrize("operation", [operator.truediv, operator.mod])
@pytest.mark.parametrize("zero", [0, "0ep", Time(0, "ep")])
def test_dividing_by_zero_is_the_usual_error(operation, zero):
    with pytest.raises(ZeroDivisionError):
        operation(Time(1, "ep"), zero)


@pytest.mark.parametrize("factor", [math.inf, math.nan])
@pytest.mark.parametrize("time", [Time(1, "ep"), Time(0.5, "dur")])
def test_scaling_to_what_is_not_finite_is_refused(time, factor):
    with pytest.raises(ValueError, match="finite"):
        time * factor


# Comparison


@pytest.mark.parametrize("compare", COMPARISONS)
@given(a=st.integers(-3, 3), b=st.integers(-3, 3), unit=whole_units)
def test_lengths_compare_as_their_values_do(compare, a, b, unit):
    expected = compare(a, b)
    assert compare(Time(a, unit), Time(b, unit)) is expected
    assert compare(Time(a, unit), b) is expected
    assert compare(Time(a, unit), f"{b}{unit.value}") is expected
    assert compare(a, Time(b, unit)) is expected
    assert compare(f"{a}{unit.value}", Time(b, unit)) is expected


@given(fractions, fractions)
def test_durations_compare_as_their_values_do(a, b):
    assert (Time(a, "dur") < Time(b, "dur")) is (a < b)
    assert (Time(a, "dur") == b) is (a == b)


@pytest.mark.parametrize("compare", COMPARISONS)
def test_comparing_a_count_with_a_float_is_a_type_error(compare):
    with pytest.raises(TypeError, match="it takes an int"):
        compare(Time(1, "ep"), 1.0)


@pytest.mark.parametrize("other", [None, [1], (1, "ep"), TimeUnit.EPOCH, object()])
def test_a_length_is_unequal_to_other_things_and_has_no_order_with_them(other):
    assert (Time(1, "ep") == other) is False
    assert (Time(1, "ep") != other) is True
    for compare in ORDERINGS:
        with pytest.raises(TypeError):
            compare(Time(1, "ep"), other)


def test_comparing_with_text_that_is_no_time_string_shows_the_grammar():
    with pytest.raises(ValueError, match=r"Invalid time string '10epochs'.* Accepted: "):
        assert Time(1, "ep") < "10epochs"
