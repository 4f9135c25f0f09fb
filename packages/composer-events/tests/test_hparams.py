"""What becomes of a constructor's arguments when they are logged."""

from abc import ABC
from collections import namedtuple
from enum import Enum, IntEnum
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_events import convert_flat_dict_to_nested_dict, convert_nested_dict_to_flat_dict, extract_hparams
from composer_time import StringEnum


class Plain:
    pass


class Told:
    def __init__(self, rate=0.5, model=None):
        self.local_hparams = extract_hparams(locals())


class ToldList(list):
    @property
    def local_hparams(self):
        return {"size": len(self)}


class Abstract(ABC):  # noqa: B024  # its metaclass is the point
    pass


class Format(StringEnum):
    FP32 = "fp32"


class Color(Enum):
    RED = ("r", 1)


class Level(IntEnum):
    HIGH = 3


Point = namedtuple("Point", ["x", "y"])


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (3, 3),
        (0.5, 0.5),
        ("10ep", "10ep"),
        (True, True),
        (None, None),
        (Format.FP32, "fp32"),
        (Color.RED, ("r", 1)),
        (Level.HIGH, 3),
        (Plain(), "Plain"),
        (1j, "complex"),
        (b"x", "bytes"),
        ({1, 2}, "set"),
        (len, "builtin_function_or_method"),
        (Abstract, "ABCMeta"),  # a class of another metaclass is a value like any other
        (ToldList([1, 2]), {"ToldList": {"size": 2}}),
        ([], []),
        ((), []),
        ({}, {}),
        ([Plain(), 1, Format.FP32, None], ["Plain", 1, "fp32", None]),
        (Point(1, Plain()), [1, "Plain"]),
        ({"a": Plain(), 2: Level.HIGH}, {"a": "Plain", 2: 3}),
        ([[1], (2,), {"a": 3}, ToldList()], ["list", "tuple", "dict", {"ToldList": {"size": 0}}]),
        ({"a": [1], "b": {"c": 2}}, {"a": "list", "b": "dict"}),
    ],
)
def test_a_value_is_reduced_to_scalars_and_names(value, kept):
    reduced = extract_hparams({"value": value})["value"]
    assert (reduced, type(reduced)) == (kept, type(kept))


def test_self_private_names_and_classes_are_left_out():
    given_locals = {"self": 1, "_private": 2, "__class__": Plain, "cls": Plain, "lr": 0.1}
    assert extract_hparams(given_locals) == {"lr": 0.1}
    assert given_locals["cls"] is Plain


def test_an_object_that_tells_its_own_is_kept_under_its_class():
    inner = {"rate": 0.5, "model": None}
    assert Told().local_hparams == inner
    assert extract_hparams({"model": Told(), "others": (Told(), Told(1))}) == {
        "model": {"Told": inner},
        "others": [{"Told": inner}, {"Told": {**inner, "rate": 1}}],
    }


def test_nested_names_are_joined_and_split_at_slashes():
    nested = {"a": 1, "b": {"c": 2, "d": {"e": [3], "f": {}}}, "g": None}
    flat = {"a": 1, "b/c": 2, "b/d/e": [3], "b/d/f": {}, "g": None}
    assert convert_nested_dict_to_flat_dict(nested) == flat
    assert convert_flat_dict_to_nested_dict(flat) == nested


def test_a_prefix_comes_before_each_name():
    assert convert_nested_dict_to_flat_dict({"a": 1, "b": {"c": 2}}, "run/x") == {"run/x/a": 1, "run/x/b/c": 2}
    assert convert_nested_dict_to_flat_dict({}, prefix="run") == {}


def test_mappings_of_any_make_and_keys_that_are_numbers_are_flattened():
    assert convert_nested_dict_to_flat_dict({"a": MappingProxyType({0: "x", 1: "y"})}) == {"a/0": "x", "a/1": "y"}


@pytest.mark.parametrize("nested", [{"a": {"b": 1}, "a/b": 2}, {"a": {0: 1, "0": 2}}])
def test_two_entries_with_one_name_are_refused(nested):
    with pytest.raises(ValueError, match=r"two entries of d are called 'a/(b|0)'"):
        convert_nested_dict_to_flat_dict(nested)


@pytest.mark.parametrize(
    "flat",
    [{"a": 1, "a/b": 2}, {"a/b": 2, "a": 1}, {"a/b/c": 1, "a": 2}, {"a": {"c": 1}, "a/b": 2}, {"a": {}, "a/b/c": 2}],
)
def test_a_name_that_has_a_value_and_others_below_it_is_refused(flat):
    before = {name: dict(value) if isinstance(value, dict) else value for name, value in flat.items()}
    with pytest.raises(ValueError, match=r"^'a' has a value in d .*\('a/'\.\.\.\)"):
        convert_flat_dict_to_nested_dict(flat)
    assert flat == before


keys = st.text(alphabet="ab ._", max_size=2)  # few letters, so that names meet; empty ones too
values = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
nested_dicts = st.dictionaries(
    keys, st.recursive(values, lambda inner: st.dictionaries(keys, inner, max_size=3), max_leaves=8), max_size=4
)
flat_dicts = st.dictionaries(st.lists(keys, min_size=1, max_size=3).map("/".join), values, max_size=6).filter(
    lambda flat: not any(other.startswith(name + "/") for name in flat for other in flat)
)


@settings(deadline=None)
@given(nested_dicts)
def test_flattening_then_nesting_is_the_identity(nested):
    assert convert_flat_dict_to_nested_dict(convert_nested_dict_to_flat_dict(nested)) == nested


@settings(deadline=None)
@given(flat_dicts)
def test_nesting_then_flattening_is_the_identity(flat):
    assert convert_nested_dict_to_flat_dict(convert_flat_dict_to_nested_dict(flat)) == flat
