from collections import ChainMap, Counter, OrderedDict, defaultdict, deque, namedtuple
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_events import batch_get, batch_set

Pair = namedtuple("Pair", ["image", "label"])


def make_mappings():
    return [
        {"a": 1, "b": 2},
        OrderedDict(a=1, b=2),
        defaultdict(list, a=1, b=2),
        ChainMap({"a": 1}, {"b": 2}),
        Counter(a=1, b=2),
    ]


@pytest.mark.parametrize("batch", make_mappings(), ids=lambda batch: type(batch).__name__)
def test_a_mapping_is_read_by_key_and_by_several_keys(batch):
    assert batch_get(batch, "b") == 2
    assert batch_get(batch, ["b", "a"]) == (2, 1)


@pytest.mark.parametrize("batch", make_mappings(), ids=lambda batch: type(batch).__name__)
def test_a_mapping_is_changed_in_place(batch):
    assert batch_set(batch, "b", 5) is batch
    assert batch_set(batch, ("a", "b"), (7, 8)) is batch
    assert (batch["a"], batch["b"]) == (7, 8)


@pytest.mark.parametrize("batch", make_mappings(), ids=lambda batch: type(batch).__name__)
def test_a_key_that_a_mapping_lacks_is_an_error_and_is_not_added(batch):
    for key in ("c", ("a", "c")):
        with pytest.raises(KeyError):
            batch_set(batch, key, (0, 0))
        with pytest.raises(KeyError):
            batch_get(batch, key)
    assert set(batch) == {"a", "b"}


@pytest.mark.parametrize("batch", make_mappings(), ids=lambda batch: type(batch).__name__)
@pytest.mark.parametrize("key", [slice(0, 1), ["a", ["b"]], ["a", slice(0, 1)]], ids=str)
def test_a_key_that_cannot_be_hashed_is_one_that_a_mapping_lacks(batch, key):
    with pytest.raises(KeyError):
        batch_get(batch, key)
    with pytest.raises(KeyError):
        batch_set(batch, key, (1, 0))
    assert set(batch) == {"a", "b"}


def test_a_tuple_that_is_a_key_itself_is_one_key():
    batch = {("a", "b"): 1, "a": 2, "b": 3}
    assert batch_get(batch, ("a", "b")) == 1
    assert batch_get(batch, ["a", "b"]) == (2, 3)


@pytest.mark.parametrize("batch", [{"a": 1}, Pair(1, 2), SimpleNamespace(a=1), [1, 2]], ids=str)
def test_a_sequence_of_one_key_gives_a_tuple_of_one_part(batch):
    key = {Pair: "image", list: 0}.get(type(batch), "a")
    assert batch_get(batch, [key]) == (1,)


@pytest.mark.parametrize("kind", [list, tuple, deque])
def test_a_sequence_is_read_by_index_and_by_several(kind):
    batch = kind([10, 20, 30])
    assert batch_get(batch, 1) == 20
    assert batch_get(batch, -1) == 30
    assert batch_get(batch, [0, 2]) == (10, 30)


@pytest.mark.parametrize("kind", [list, deque])
def test_a_mutable_sequence_is_changed_in_place(kind):
    batch = kind([10, 20, 30])
    assert batch_set(batch, 1, "x") is batch
    assert batch_set(batch, [0, 2], ["y", "z"]) is batch
    assert list(batch) == ["y", "x", "z"]


def test_slices_are_keys_too():
    assert batch_get([1, 2, 3, 4], slice(1, 3)) == [2, 3]
    assert batch_get((1, 2, 3, 4), [slice(0, 1), slice(2, 4)]) == ((1,), (3, 4))
    assert batch_set([1, 2, 3], slice(0, 2), [8, 9]) == [8, 9, 3]
    assert batch_set((1, 2, 3), slice(0, 2), (8, 9)) == (8, 9, 3)


def test_a_tuple_is_copied():
    batch = ("image", "label")
    assert batch_set(batch, 1, "smooth") == ("image", "smooth")
    assert batch_set(batch, [0, 1], ["a", "b"]) == ("a", "b")
    assert batch == ("image", "label")


@pytest.mark.parametrize("key", [1, "label", slice(1, 2)])
def test_a_namedtuple_is_copied_and_keeps_its_type(key):
    value = ("new",) if isinstance(key, slice) else "new"
    changed = batch_set(Pair("image", "label"), key, value)
    assert changed == Pair("image", "new")
    assert type(changed) is Pair


def test_a_namedtuple_is_read_by_the_names_of_its_fields():
    assert batch_get(Pair("i", "l"), "label") == "l"
    assert batch_get(Pair("i", "l"), ["label", "image"]) == ("l", "i")


def test_an_object_is_read_and_changed_by_attribute():
    batch = SimpleNamespace(image=1, label=2)
    assert batch_get(batch, "image") == 1
    assert batch_get(batch, ["label", "image"]) == (2, 1)
    assert batch_set(batch, "label", 3) is batch
    batch_set(batch, ["image", "label"], [8, 9])
    assert (batch.image, batch.label) == (8, 9)


def test_a_function_is_the_getter_or_the_setter():
    def setter(batch, value):
        batch["a"]["b"] = value
        return batch

    assert batch_get({"a": {"b": 1}}, lambda batch: batch["a"]["b"]) == 1
    assert batch_set({"a": {"b": 1}}, setter, 2) == {"a": {"b": 2}}


def test_a_pair_of_functions_serves_both_ways():
    key = (lambda batch: batch[0], lambda batch, value: [value, *batch[1:]])
    assert batch_get([1, 2], key) == 1
    assert batch_set([1, 2], key, 9) == [9, 2]


@pytest.mark.parametrize("key", [(len,), (len, len, len)])
def test_functions_that_are_no_pair_are_refused(key):
    with pytest.raises(ValueError, match=r"pair: \(getter, setter\)"):
        batch_get([1], key)
    with pytest.raises(ValueError, match=r"pair: \(getter, setter\)"):
        batch_set([1], key, 0)


@pytest.mark.parametrize("value", [[1], [1, 2, 3], 5, "ab"])
def test_as_many_values_as_keys_are_needed(value):
    with pytest.raises(ValueError, match="one value for each key"):
        batch_set([10, 20, 30], [0, 1], value)


def test_an_index_out_of_range_says_so():
    with pytest.raises(IndexError):
        batch_get([1, 2], 5)
    with pytest.raises(IndexError):
        batch_set([1, 2], 5, 0)


def test_what_can_be_set_in_no_way_is_refused():
    with pytest.raises(RuntimeError, match="pair of functions"):
        batch_set(object(), "label", 1)
    with pytest.raises(RuntimeError, match="by index or slice"):
        batch_set((1, 2), "label", 1)


@settings(deadline=None)  # a busy machine is no failure
@given(batch=st.lists(st.integers(), min_size=1), data=st.data())
def test_what_was_set_is_what_is_read(batch, data):
    key = data.draw(st.integers(-len(batch), len(batch) - 1))
    for kind in (list, tuple):
        changed = batch_set(kind(batch), key, "new")
        assert batch_get(changed, key) == "new"
        assert [item for item in changed if item != "new"] == [n for i, n in enumerate(batch) if i != key % len(batch)]
