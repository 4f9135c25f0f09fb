import io
from collections import namedtuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_events import IteratorFileStream, ensure_tuple, iterate_with_callback, map_collection

Point = namedtuple("Point", ["x", "y"])


@pytest.mark.parametrize(
    ("given_value", "expected"),
    [
        (None, ()),
        ("text", ("text",)),
        (b"bytes", (b"bytes",)),
        (bytearray(b"b"), (bytearray(b"b"),)),
        ([1, 2], (1, 2)),
        ((1, 2), (1, 2)),
        (range(3), (0, 1, 2)),
        ({"a": 1, "b": 2}, (1, 2)),
        ({3}, ({3},)),
        (4, (4,)),
    ],
)
def test_ensure_tuple_tells_one_from_many(given_value, expected):
    assert ensure_tuple(given_value) == expected


@pytest.mark.parametrize(
    ("given_value", "expected"),
    [
        (None, None),
        ((1, 2), (2, 3)),
        ([1, 2], [2, 3]),
        ({"a": 1}, {"a": 2}),
        (1, 2),
        (Point(1, 2), Point(2, 3)),
    ],
)
def test_map_collection_keeps_the_kind_of_collection(given_value, expected):
    mapped = map_collection(given_value, lambda n: n + 1)
    assert mapped == expected
    assert type(mapped) is type(expected)


@settings(deadline=None)  # a busy machine is no failure
@given(chunks=st.lists(st.binary(max_size=20), max_size=8), buffer_size=st.integers(1, 33))
def test_a_stream_reads_the_same_bytes_whatever_the_chunks_and_the_buffer(chunks, buffer_size):
    stream = io.BufferedReader(IteratorFileStream(chunks), buffer_size)
    assert stream.read() == b"".join(chunks)


def test_a_stream_reads_unbuffered_in_pieces():
    stream = IteratorFileStream(iter([b"abc", b"", b"de"]))
    assert stream.readable()
    assert [stream.read(2) for _ in range(4)] == [b"ab", b"c", b"de", b""]


def test_the_callback_hears_of_zero_and_then_of_each_chunk():
    heard = []
    chunks = list(iterate_with_callback([b"ab", b"cde"], 5, lambda done, total: heard.append((done, total))))
    assert chunks == [b"ab", b"cde"]
    assert heard == [(0, 5), (2, 5), (5, 5)]


def test_chunks_pass_through_without_a_callback():
    assert list(iterate_with_callback([b"ab"], 2)) == [b"ab"]
