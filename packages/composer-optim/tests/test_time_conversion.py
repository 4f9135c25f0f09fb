import pytest

from composer_optim.time_conversion import convert_time
from composer_time import Time


@pytest.mark.parametrize(
    ("time", "max_duration", "expected"),
    [
        ("0.25dur", "8ep", "200ba"),
        ("0.25dur", "80ba", "20ba"),
        ("0.25dur", "80sp", "20sp"),
        ("0.25dur", "80tok", "20tok"),
        ("0.25dur", "80iter", "20iter"),
        ("0.33dur", "10ba", "3ba"),
        ("2ep", "8ep", "200ba"),
        ("2ep", "80tok", "200ba"),
        ("7ba", "8ep", "7ba"),
        ("7sp", "8ep", "7sp"),
        ("7tok", "8ep", "7tok"),
        ("7iter", "8ep", "7iter"),
    ],
)
def test_a_length_becomes_what_the_training_counts(training, time, max_duration, expected):
    state = training(max_duration, batches_per_epoch=100)
    assert str(convert_time(time, state)) == expected
    assert str(convert_time(Time.from_timestring(time), state)) == expected


@pytest.mark.parametrize(
    ("time", "max_duration", "expected"),
    [
        ("7ba", "8ep", "3ba"),
        ("3ep", "8ep", "150ba"),
        ("0.25dur", "8ep", "200ba"),
        ("0.25dur", "80ba", "20ba"),
    ],
)
def test_the_ratio_scales_lengths_but_not_fractions_of_the_duration(training, time, max_duration, expected):
    assert str(convert_time(time, training(max_duration, batches_per_epoch=100), ssr=0.5)) == expected


def test_a_large_count_of_tokens_is_not_rounded_to_a_float(training):
    assert convert_time(Time(2**53 + 1, "tok"), training("1ep")).value == 2**53 + 1


def test_wall_clock_time_is_refused(training):
    with pytest.raises(ValueError, match=r"Wall clock time not an allowed time unit\."):
        convert_time("30sec", training("1ep"))


@pytest.mark.parametrize("time", ["2ep", "0.5dur"])
def test_epochs_of_unknown_length_are_refused(training, time):
    with pytest.raises(RuntimeError, match="dataloader_len is None"):
        convert_time(time, training("8ep", batches_per_epoch=None))


def test_batches_need_no_length_of_the_epoch(training):
    assert convert_time("0.5dur", training("8ba", batches_per_epoch=None)) == "4ba"


def test_an_unset_max_duration_is_refused(training):
    with pytest.raises(AssertionError, match="max_duration"):
        convert_time("1ba", training(None))


def test_a_bare_number_is_refused_with_the_name_of_the_argument(training):
    with pytest.raises(TypeError, match="time=10 has no unit"):
        convert_time(10, training("1ep"))
