"""Small functions over iterables."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["IteratorFileStream", "ensure_tuple", "iterate_with_callback", "map_collection"]


def ensure_tuple(x: Any) -> tuple[Any, ...]:
    """Turn one or many into a tuple.

    Args:
        x: `None` gives `()`, a sequence its items, a mapping its values. Text, bytes and everything else, tensors,
            arrays and sets included, count as one element.

    Example:
        >>> ensure_tuple(None), ensure_tuple("ab"), ensure_tuple([1, 2])
        ((), ('ab',), (1, 2))
    """
    if x is None:
        return ()
    if isinstance(x, (str, bytes, bytearray)):
        return (x,)
    if isinstance(x, (tuple, list, Sequence)):  # the two usual kinds first: an ABC check costs ten times as much
        return tuple(cast("Sequence[Any]", x))
    if isinstance(x, Mapping):
        return tuple(cast("Mapping[Any, Any]", x).values())
    return (x,)


def map_collection(collection: Any, map_fn: Callable[[Any], Any]) -> Any:
    """Apply a function to the elements of a tuple, list or dict, or to the one element there is.

    Args:
        collection: `None` stays `None`. A tuple or list keeps its type, a dict its keys.
        map_fn: Called with each element.

    Example:
        >>> map_collection({"a": 1, "b": 2}, lambda n: n + 1)
        {'a': 2, 'b': 3}
    """
    if collection is None:
        return None
    if isinstance(collection, (tuple, list)):
        items = cast("Sequence[Any]", collection)
        mapped = (map_fn(item) for item in items)
        if hasattr(items, "_make"):  # a namedtuple's constructor takes the fields one by one
            return cast(Any, type(items))._make(mapped)
        return cast(Any, type(items))(mapped)
    if isinstance(collection, dict):
        return {key: map_fn(value) for key, value in cast("dict[Any, Any]", collection).items()}
    return map_fn(collection)


class IteratorFileStream(io.RawIOBase):
    """A readable binary file over chunks of bytes that arrive one after another.

    Wrap it in `io.BufferedReader` to read in other sizes than the chunks have.

    Args:
        iterator: Yields the file's bytes in order. Empty chunks are skipped.

    Example:
        >>> io.BufferedReader(IteratorFileStream([b"ab", b"cde"])).read(4)
        b'abcd'
    """

    def __init__(self, iterator: Iterable[bytes]) -> None:
        self.iterator = iter(iterator)
        self._leftover = memoryview(b"")

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill `buffer` with what is at hand, at most one chunk; 0 means the end."""
        target = memoryview(buffer).cast("B")
        if not target:
            return 0
        while not self._leftover:
            chunk = next(self.iterator, None)
            if chunk is None:
                return 0
            self._leftover = memoryview(chunk)
        size = min(len(target), len(self._leftover))
        target[:size] = self._leftover[:size]
        self._leftover = self._leftover[size:]
        return size

    def readable(self) -> bool:
        """Answer True."""
        return True


def iterate_with_callback(
    iterator: Iterable[bytes], total_len: int, callback: Callable[[int, int], None] | None = None
) -> Iterator[bytes]:
    """Yield chunks and report how many bytes have been handed on.

    Args:
        iterator: Yields chunks.
        total_len: The sum of their lengths, passed through to `callback`.
        callback: Called as `callback(done, total_len)`: once with 0 before the first chunk, then after each chunk.
    """
    done = 0
    if callback is not None:
        callback(done, total_len)
    for chunk in iterator:
        done += len(chunk)
        yield chunk
        if callback is not None:
            callback(done, total_len)
