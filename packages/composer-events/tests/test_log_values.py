"""How a logged value reads."""

from collections import OrderedDict

import pytest

from composer_events import format_log_data_value


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (None, "None"),
        ("hello", '"hello"'),
        ("", '""'),
        (3, "3"),
        (True, "True"),
        (0.70341, "0.7034"),
        (1.0, "1.0000"),
        (float("nan"), "nan"),
        ({}, "{ }"),
        ({"a": 1}, '{ "a": 1, }'),
        (OrderedDict(a=1.5, b=None), '{ "a": 1.5000, "b": None, }'),
        ({"a": {"b": "c"}}, '{ "a": { "b": "c", }, }'),
        ([], "[]"),
        ([1, "a", 0.5], '[1, "a", 0.5000]'),
        ((1, [2, 3]), "[1, [2, 3]]"),
        (range(3), "[0, 1, 2]"),
        (1 + 2j, "(1+2j)"),
    ],
)
def test_a_value_reads_as_the_format_says(data, text):
    assert format_log_data_value(data) == text


def test_names_in_a_mapping_are_strings():
    with pytest.raises(TypeError, match="key 3 of a logged mapping is a int"):
        format_log_data_value({3: "x"})


def test_an_array_without_axes_reads_as_its_value():
    class Scalar:
        ndim = 0

        def __iter__(self):
            raise TypeError("iteration over a 0-d array")

        def __str__(self):
            return "2.5"

    assert format_log_data_value(Scalar()) == "2.5"
