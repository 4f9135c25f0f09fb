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

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers()
plain_data = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner) | st.frozensets(st.integers())
    ),
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
    "a far index of the memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "a long string": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "a long array": b"\x80\x02cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85R.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_few_bytes_cannot_ask_for_much_memory(name):
    with pytest.raises(CheckpointError):
        safe_unpickle(BOMBS[name])


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
