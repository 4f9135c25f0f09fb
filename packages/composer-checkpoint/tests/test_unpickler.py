import collections
import contextlib
import datetime
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_checkpoint import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError, safe_unpickle
from composer_checkpoint.pickles import PLAIN_GLOBALS

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers()
plain_data = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner) | st.frozensets(keys),
    max_leaves=20,
)


@given(plain_data, st.integers(2, 5))
def test_plain_data_comes_back_from_every_binary_protocol(data, protocol):
    assert safe_unpickle(pickle.dumps(data, protocol=protocol)) == data


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_values_of_the_standard_library_numpy_and_torch_come_back(protocol):
    state = {
        "when": datetime.timedelta(1, 2, 3),
        "ordered": collections.OrderedDict(a=1),
        "counted": collections.Counter("aab"),
        "queue": collections.deque([1], maxlen=3),
        "default": collections.defaultdict(list, a=[1]),
        "bytes": bytearray(b"\x00\xff"),
        "number": 1 + 2j,
        "slice": slice(1, None, 2),
        "random": random.Random(3).getstate(),
        "numpy": np.random.RandomState(3).get_state(),
        "scalar": np.float64(0.5),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3).T,
        "text": np.array(["a", "bc"]),
    }
    found = safe_unpickle(pickle.dumps(state, protocol=protocol))
    for name in ("array", "text"):
        assert type(found[name]) is np.ndarray
        np.testing.assert_array_equal(found.pop(name), state[name])
    np.testing.assert_array_equal(found.pop("numpy")[1], state["numpy"][1])
    assert all(found[name] == state[name] and type(found[name]) is type(state[name]) for name in found)


def test_tensors_of_a_plain_pickle_come_back():
    state = {"rng": torch.get_rng_state(), "half": torch.ones(2, 3, dtype=torch.float16).t(), "size": torch.Size([2])}
    found = safe_unpickle(pickle.dumps(state))
    assert all(torch.equal(found[name], state[name]) for name in ("rng", "half"))
    assert found["size"] == state["size"]


def test_a_file_or_a_path_is_read_as_bytes_are(tmp_path):
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps([1, 2]))
    assert safe_unpickle(path) == [1, 2]
    with open(path, "rb") as file:
        assert safe_unpickle(file) == [1, 2]


def test_what_the_caller_allows_may_be_named():
    data = pickle.dumps(pickle.PickleError("x"))
    with pytest.raises(UnsafeCheckpointError):
        safe_unpickle(data)
    assert str(safe_unpickle(data, allow={"_pickle.PickleError": pickle.PickleError})) == "x"


@pytest.mark.parametrize(
    "array", [np.array([object()]), np.zeros(2, dtype=[("a", "f8")]), np.array(["2026-01-01"], dtype="M8[D]")]
)
def test_arrays_of_objects_structures_and_dates_are_refused(array):
    with pytest.raises(CheckpointError):
        safe_unpickle(pickle.dumps(array, protocol=2))


def test_an_array_whose_shape_does_not_fit_its_bytes_is_refused():
    data = pickle.dumps(np.zeros(3, dtype=np.int8), protocol=2)
    assert data.count(b"K\x03\x85") == 1
    with pytest.raises(CorruptCheckpointError, match=r"does not fill 3 bytes"):
        safe_unpickle(data.replace(b"K\x03\x85", b"K\x07\x85"))


BOMBS = {
    "a long bytearray": b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "long bytes": b"\x80\x02cbuiltins\nbytes\nJ\xff\xff\xff\x7f\x85R.",
    "a long string": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "a long array": b"\x80\x02cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85R.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_few_bytes_cannot_ask_for_much_memory(name):
    with pytest.raises(CheckpointError):
        safe_unpickle(BOMBS[name])


def test_a_far_index_of_the_memo_takes_no_memory():
    assert safe_unpickle(b"\x80\x02Nr\xff\xff\xff\x7f.") is None


def named(name):
    module, _, name = name.rpartition(".")
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def unfolding(levels):
    """A list in which the innermost is reached by 2**levels paths; it is left in the memo, too."""
    steps = b"".join(b"0](h" + bytes([level, ord("h"), level]) + b"eq" + bytes([level + 1]) for level in range(levels))
    return b"]q\x00" + steps


def copied_often(name, value, times=6000):
    return b"\x80\x03" + value + b"q\x01" + named(name) + b"q\x02](" + b"h\x02h\x01\x85R" * times + b"e."


MEGABYTE = b"B" + (1 << 20).to_bytes(4, "little") + b"x" * (1 << 20)
ITEMS = b"(" + b"K\x01" * (1 << 16) + b"t"
COPIES = {
    "bytearray": copied_often("builtins.bytearray", MEGABYTE),
    "text": copied_often("_codecs.encode", b"X" + MEGABYTE[1:]).replace(b"\x85R", b"X\x06\x00\x00\x00latin1\x86R"),
    "list": copied_often("builtins.list", ITEMS),
    "frozenset": copied_often("builtins.frozenset", ITEMS),
    "deque": copied_often("collections.deque", ITEMS),
    "size": copied_often("torch.Size", ITEMS),
    "a queue": copied_often("builtins.list", named("collections.deque") + b")R" + ITEMS[:-1] + b"e"),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_pickle_cannot_copy_its_largest_part_thousands_of_times(name):
    with pytest.raises(CorruptCheckpointError, match="use up the memory"):
        safe_unpickle(COPIES[name])


@pytest.mark.parametrize("name", ["builtins.list", "builtins.frozenset", "collections.deque"])
@pytest.mark.parametrize("value", [torch.ones(3), np.ones(3)], ids=["tensor", "array"])
def test_a_container_is_not_made_of_an_arrays_elements(name, value):
    with pytest.raises(CorruptCheckpointError, match="a container is made of other containers"):
        safe_unpickle(b"\x80\x02" + named(name) + pickle.dumps(value, protocol=2)[2:-1] + b"\x85R.")


@pytest.mark.parametrize("name", ["torch.torch_version.TorchVersion", "numpy.dtype"])
def test_text_of_what_unfolds_to_endless_is_not_made(name):
    with pytest.raises(CheckpointError):
        safe_unpickle(b"\x80\x02" + unfolding(60) + b"q\x99" + named(name) + b"h\x99\x85R.")


def test_a_reference_outside_that_unfolds_to_endless_is_refused_at_once():
    with pytest.raises(UnsafeCheckpointError, match="refers to a list"):
        safe_unpickle(b"\x80\x02" + unfolding(60) + b"Q.")


def test_shared_containers_are_gone_through_once_and_stay_shared():
    found = safe_unpickle(b"\x80\x02" + unfolding(60) + b".")
    for _ in range(60):
        assert found[0] is found[1]
        found = found[0]
    assert found == []


def test_arrays_in_a_list_that_is_shared_or_holds_itself_come_back():
    inner = [np.arange(3)]
    outer = [inner, {"again": inner}]
    outer.append(outer)
    found = safe_unpickle(pickle.dumps(outer))
    assert type(found[0][0]) is np.ndarray
    assert found[1]["again"] is found[0]
    assert isinstance(found[2], list)


@pytest.mark.parametrize("depth", [1_000, 9_000])
def test_deep_nesting_is_read_without_recursion(depth):
    found = safe_unpickle(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".")
    for _ in range(depth - 1):
        (found,) = found
    assert found == []


def test_nesting_deeper_than_any_checkpoints_is_refused_by_our_own_error():
    with pytest.raises(CorruptCheckpointError, match="levels deep"):
        safe_unpickle(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".")


def test_keys_that_all_have_one_hash_are_refused_before_they_take_time():
    keys = {(2**61 - 1) * index: None for index in range(1 << 64, (1 << 64) + 5000)}.keys()
    data = b"\x80\x02}(" + b"".join(pickle.dumps(key, protocol=2)[2:-1] + b"N" for key in keys) + b"u."
    with pytest.raises(CorruptCheckpointError, match="endless time"):
        safe_unpickle(data)


@pytest.mark.parametrize("holder", [b"]q\x01K\x01a", named("builtins.bytearray") + b"C\x02ab\x85Rq\x01"])
def test_a_pickle_cannot_put_a_list_into_itself_again_and_again(holder):
    doubling = b"h\x02h\x01s" * 100
    with pytest.raises(CorruptCheckpointError, match="items are set in dicts"):
        safe_unpickle(b"\x80\x03" + holder + named("builtins.slice") + b"K\x00K\x00\x86Rq\x020" + doubling + b".")


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(b"(h\x01K\x00J\xff\xff\xff\x7f\x85K\x01\x85t", id="geometry"),
        pytest.param(b"(\x89\x89}K\x00h\x02st", id="hooks"),
        pytest.param(b"}", id="attributes"),
    ],
)
def test_a_pickle_cannot_change_a_tensor_or_its_bytes(state):
    tensor = pickle.dumps(torch.ones(2), protocol=3)
    storage = tensor.index(b"Rq", tensor.index(b"_load_from_bytes")) + 1
    remembered = tensor[storage : storage + 2]
    assert remembered[:1] == b"q"
    state = state.replace(b"h\x01", b"h" + remembered[1:]).replace(b"h\x02", named("builtins.bytearray"))
    with pytest.raises(UnsafeCheckpointError, match="nothing was changed"):
        safe_unpickle(tensor[:-1] + state + b"b.")
    with pytest.raises(UnsafeCheckpointError, match="nothing was changed"):
        safe_unpickle(tensor[:-1] + b"0h" + remembered[1:] + state + b"b.")


def test_arrays_of_more_dims_than_there_are_take_no_endless_time():
    array = pickle.dumps(np.zeros(3, dtype=np.int8), protocol=2)
    long_shape = b"(" + b"\x8a\x08" + b"\xff" * 7 + b"\x7fq\xf0" + b"h\xf0" * 2_000_000 + b"t"
    with pytest.raises(CorruptCheckpointError, match="up to 64 whole numbers"):
        safe_unpickle(array.replace(b"K\x03\x85", long_shape))


def test_tensors_and_arrays_in_a_queue_come_back_as_what_they_are():
    (tensor, array) = safe_unpickle(pickle.dumps(collections.deque([torch.ones(2), np.ones(2)], maxlen=5)))
    assert (type(tensor), type(array)) == (torch.Tensor, np.ndarray)


def test_deques_inside_each_other_and_many_times_in_one_list_take_little_time():
    nested = collections.deque([1])
    for _ in range(40):
        nested = collections.deque([nested] * 3)
    nested.append(nested)
    assert safe_unpickle(pickle.dumps(nested))[0][1][2] is not None
    wide = collections.deque([None] * 20_000)
    first, *others = safe_unpickle(pickle.dumps([wide] * 20_000))
    assert first == wide
    assert all(other is first for other in others)


def unfolding_tuple(levels):
    """A tuple that reaches its innermost by 2**levels paths, alone on the stack."""
    steps = b"".join(b"0h" + bytes([level, ord("h"), level]) + b"\x86q" + bytes([level + 1]) for level in range(levels))
    return b")q\x00" + steps


def one_of_two_numbers_of_one_hash(bit):
    return b"J" + (-1 - bit).to_bytes(4, "little", signed=True)  # hash(-1) == hash(-2)


COLLIDING_KEYS = b"".join(
    b"(" + b"".join(one_of_two_numbers_of_one_hash(number >> bit & 1) for bit in range(14)) + b"tN"
    for number in range(1 << 14)
)


def tower_of_sets(levels, start):
    """Two sets under memo numbers `start` and `start + 1`, each with both of those before, level above level."""
    made = named("builtins.frozenset") + b"]%b\x85R"
    put = b"q%c0"
    below, beside = bytes([start]), bytes([start + 1])
    steps = made % b"K\x01a" + put % below + made % b"K\x02a" + put % beside
    for level in range(levels):
        both = b"(h" + below + b"h" + beside
        lower, upper = made % (both + b"e"), made % (both + b"M" + (100 + level).to_bytes(2, "little") + b"e")
        steps += lower + put % (start + 2) + upper + put % beside + b"h%c" % (start + 2) + put % below
    return steps


def sets_of(times):
    return b"".join(
        named("builtins.frozenset") + b"h\x01\x85RJ" + n.to_bytes(4, "little") + b"\x86N" for n in range(times)
    )


LONG_LIST = b"](" + b"".join(b"M" + number.to_bytes(2, "little") for number in range(1000)) + b"e"
BURDENSOME_KEYS = {
    "sets of sets, that are equal, in a set": tower_of_sets(60, 0)
    + tower_of_sets(60, 10)
    + named("builtins.frozenset")
    + b"](h\x00h\x0ae\x85R.",
    "sets of sets, that are equal": tower_of_sets(60, 0) + tower_of_sets(60, 10) + b"}(h\x00Nh\x0aNu.",
    "equal sets, each in a tuple": LONG_LIST + b"q\x010}(" + sets_of(100) + b"u.",
    "a set of a list that is filled later": b"}("
    + named("builtins.frozenset")
    + b"]q\x01\x85h\x01"
    + LONG_LIST[1:]
    + b"0RNu.",
    "of a dict": b"}" + unfolding_tuple(60).replace(b")q", b"Nq", 1) + b"Ns.",
    "of a dict, several at once": b"}(" + unfolding_tuple(60) + b"Nu.",
    "of a dict between marks": b"(" + unfolding_tuple(60) + b"Nd.",
    "of a set": b"\x8f(" + unfolding_tuple(60) + b"\x90.",
    "of a frozenset": b"(" + unfolding_tuple(60) + b"\x91.",
    "of a set that is called": named("builtins.set") + b"](" + unfolding_tuple(60) + b"e\x85R.",
    "of a dict that is called": named("collections.OrderedDict") + b"]](" + unfolding_tuple(60) + b"Nea\x85R.",
    "behind a popped mark": b"}(0" + unfolding_tuple(60) + b"Ns.",
    "a size": b"}" + named("torch.Size") + unfolding_tuple(60) + b"\x85RNs.",
    "far too deep": b"})" + b"\x85" * 1_000_000 + b"Ns.",
    "of one hash": b"}(" + COLLIDING_KEYS + b"u.",
    "one long tuple, again and again": b"}((" + b"K\x01" * 4000 + b"tq\x01N" + b"h\x01N" * 100_000 + b"u.",
    "one long number, again and again": b"}(\x8b\x00\x00\x01\x00"
    + b"\x01" * (1 << 16)
    + b"q\x01N"
    + b"h\x01N" * 9999
    + b"u.",
}


@pytest.mark.parametrize("name", BURDENSOME_KEYS)
def test_keys_that_would_take_endless_time_are_refused_before_they_do(name):
    reason = {"equal sets, each in a tuple": "use up the memory", "a size": "takes an iterable of 'int'"}
    with pytest.raises(CorruptCheckpointError, match=reason.get(name, "endless time")):
        safe_unpickle(b"\x80\x04" + BURDENSOME_KEYS[name])


def test_large_sets_and_sets_as_keys_come_back():
    for data in ([frozenset(range(10_000)), {(1, 2): 3}], {frozenset({n, n + 1}): n for n in range(3000)}):
        for protocol in (2, 4):
            assert safe_unpickle(pickle.dumps(data, protocol=protocol)) == data


def test_tuples_that_unfold_to_endless_are_no_burden_as_values():
    found = safe_unpickle(b"\x80\x02}X\x01\x00\x00\x00a" + unfolding_tuple(60) + b"s.")["a"]
    for _ in range(60):
        assert found[0] is found[1]
        found = found[0]


@pytest.mark.parametrize("protocol", [2, 4])
def test_thousands_of_short_tuples_and_long_numbers_as_keys_come_back(protocol):
    data = {
        **{(layer, (head, "x")): None for layer in range(30) for head in range(30)},
        **{2**70 + number: None for number in range(1000)},
        frozenset([1, (2, 3)]): {(4, 5), (6,)},
    }
    assert safe_unpickle(pickle.dumps(data, protocol=protocol)) == data


def test_the_long_numbers_of_random_generators_come_back():
    states = [np.random.PCG64(seed).state for seed in range(1000)]
    assert safe_unpickle(pickle.dumps(states)) == states


def test_arrays_of_the_other_byte_order_come_back():
    array = np.arange(1000, dtype=">f8").reshape(10, 100)
    found = safe_unpickle(pickle.dumps(array, protocol=2))
    assert found.dtype == array.dtype.newbyteorder("=")  # as NumPy itself loads it
    np.testing.assert_array_equal(found, array)


NAMES = [
    *PLAIN_GLOBALS,
    "numpy.ndarray",
    "numpy.dtype",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy._core.numeric._frombuffer",
    "torch._utils._rebuild_tensor_v2",
    "torch.storage._load_from_bytes",
    "torch.Size",
    "torch.device",
    "torch.float32",
    "torch.torch_version.TorchVersion",
]
ATTRIBUTES = ("__defaults__", "__code__", "__call__", "__init__", "__new__", "__setstate__", "most_common", "dtype")
HIDING = b"}(" + b"".join(pickle.dumps(name, protocol=2)[2:-3] + named("builtins.int") for name in ATTRIBUTES) + b"u"


@pytest.mark.parametrize("state", [HIDING, b"N" + HIDING + b"\x86", b"](NK\x01e"], ids=["dict", "slots", "list"])
@pytest.mark.parametrize("name", NAMES)
def test_a_pickle_cannot_change_what_it_names(name, state):
    def attributes():
        kinds = (collections.Counter, collections.OrderedDict, torch.Size, torch.device, datetime.timedelta)
        return [dict(vars(kind)) for kind in kinds]

    before = attributes()
    with pytest.raises(CheckpointError):
        safe_unpickle(b"\x80\x02" + named(name) + state + b"b.")
    assert attributes() == before
    test_values_of_the_standard_library_numpy_and_torch_come_back(2)
    test_tensors_of_a_plain_pickle_come_back()


@given(st.binary(max_size=40))
def test_arbitrary_bytes_are_read_or_refused_by_our_own_errors(data):
    with contextlib.suppress(CheckpointError):
        safe_unpickle(b"\x80\x04" + data)


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_pickle_is_read_or_refused_by_our_own_errors(position, byte):
    data = bytearray(pickle.dumps({"a": np.arange(3), "b": [torch.ones(2), {1: "x"}], "c": datetime.timedelta(3)}))
    data[position % len(data)] = byte
    with contextlib.suppress(CheckpointError):
        safe_unpickle(bytes(data))
