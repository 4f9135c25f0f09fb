"""Reading, changing, counting and splitting batches of common types."""

from __future__ import annotations

import inspect
import io
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from operator import attrgetter, itemgetter, setitem
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from composer_events.arguments import loaded

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["batch_get", "batch_set", "IteratorFileStream", "ensure_tuple", "iterate_with_callback", "map_collection"]

# Types of values in a mapping that belong to every sample, such as the name of a task.
_SCALARS = (int, float, str, bool, type(None))


def count_samples(batch: Any) -> int:
    """Return the number of samples in a batch that `default_split_batch` can split.

    Any object with a `shape` is treated as a tensor, so that torch need not be imported.
    """
    if type(batch) in (tuple, list) and (
        length := _length_of_tensors(batch)
    ):  # the common case, without the general checks
        return length
    try:
        lengths = _lengths(batch)
    except _LengthMismatch as error:
        raise NotImplementedError(f"Samples are counted in multiple Tensors of one length. {error}") from None
    if lengths:
        return lengths[-1]
    raise (ValueError if batch else NotImplementedError)(
        f"Unable to determine the number of samples in the batch {batch!r}: it holds neither a tensor "
        f"nor multiple Tensors or lists. Pass get_num_samples_in_batch to DataSpec."
    )


def default_split_batch(batch: Any, microbatch_size: int | float) -> Sequence[Any]:
    """Split a batch into microbatches of one size; the last one takes the remainder.

    | batch | microbatches |
    |---|---|
    | tensor | its slices along dim 0 |
    | mapping | dicts: tensors, lists and nested mappings split, single values (number, text, `None`) repeated in each |
    | sequence of numbers or of texts | its slices |
    | other tuple or list | tuples of the slices of its items: tensors, lists, tuples, mappings |

    A batch shorter than one microbatch is returned as one microbatch, with a warning.

    Args:
        batch: All its parts must have the same length.
        microbatch_size: Samples per microbatch, 1 or more.

    Raises:
        ValueError: If the size is not a whole number, parts differ in length, or a part cannot be split.
        NotImplementedError: If the batch has a type that is not in the table.

    Example:
        >>> default_split_batch(["a", "b", "c"], 2)
        [['a', 'b'], ['c']]
    """
    if type(batch) in (tuple, list) and type(microbatch_size) is int:  # the common case, without the general checks
        length = _length_of_tensors(batch)
        if length == microbatch_size > 0:
            return [tuple(batch)]
        if length > microbatch_size > 0:
            return list(zip(*[_slices(item, microbatch_size) for item in batch], strict=True))
    microbatch_size = _whole_number(microbatch_size)
    length = next(iter(_lengths(batch)), None)
    if length is None or length == microbatch_size:  # nothing to split, or already one microbatch
        return [_whole(batch)]
    if length < microbatch_size:
        kind = "tensor" if any(map(is_tensor, (batch, *ensure_tuple(batch)))) else "list"
        warnings.warn(
            f"Cannot split {kind} of length {length} into batches of size {microbatch_size}. As it is smaller, no "
            f"splitting will be done. This may happen on the last batch of a dataset if it is a smaller size than the "
            f"microbatch size.",
            UserWarning,
            stacklevel=_level_of_user(),
        )
        return [_whole(batch)]
    return _cut(batch, length, microbatch_size)


def _level_of_user() -> int:
    """Return the `stacklevel`, for a warning of the caller, of the first frame outside Composer's packages."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith(("composer.", "composer_")):
        level, frame = level + 1, frame.f_back
    return level


def split_batch_by_count(batch: Any, num_microbatches: int) -> Sequence[Any]:
    """Split a batch into a given number of microbatches of equal size, as `torch.chunk` does.

    If the length is not divisible, the last one is shorter and there may be fewer. A batch with fewer samples than
    `num_microbatches` gives one microbatch per sample, with a warning.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches!r} is not a count: a batch has 1 microbatch or more.")
    if num_microbatches == 1:
        return [batch]
    length = next(iter(_lengths(batch)), None)
    if length is not None and length < num_microbatches:
        warnings.warn(
            f"Cannot split batch of length {length} into {num_microbatches} microbatches: each sample becomes one. "
            f"Lower the number of microbatches, or pass drop_last=True to the dataloader.",
            UserWarning,
            stacklevel=_level_of_user(),
        )
    # Rounded up, as in `torch.chunk`. A batch without a length counts as one sample.
    return default_split_batch(batch, max(1, -(-(length or 1) // num_microbatches)))


def _whole_number(microbatch_size: int | float) -> int:
    try:
        if isinstance(microbatch_size, bool):
            raise TypeError
        size = operator.index(cast(Any, microbatch_size))  # accepts NumPy's integers too
    except TypeError:
        raise ValueError(
            f"microbatch_size={microbatch_size!r} is not a whole number, and the default way to split a batch needs "
            f"one. Pass split_batch to DataSpec for batches that can be cut inside a sample."
        ) from None
    if size < 1:
        raise ValueError(f"microbatch_size={size} is not a size: a microbatch has 1 sample or more.")
    return size


def _length_of_tensors(batch: Sequence[Any]) -> int:
    """Return the common length of a tuple or list that contains only tensors, and 0 for any other batch."""
    length: int | None = None
    for item in batch:
        shape = getattr(item, "shape", None)
        if not shape or (length is not None and shape[0] != length):
            return 0
        length = shape[0]
    return int(length or 0)


class _LengthMismatch(ValueError):
    """Error for parts of a batch without a common length."""


def _lengths(batch: Any) -> list[int]:
    """Return the possible lengths of a batch, or an empty list if it has nothing to split.

    There are two if all parts are lists of tensors: one item per sample or, last, one row of each tensor per sample.
    """
    if _is_array(batch):
        return [_rows(batch)]
    if isinstance(batch, Mapping):
        return _common(cast("Mapping[Any, Any]", batch).items(), scalars=_SCALARS)
    if not _is_sequence(batch):
        raise NotImplementedError(
            f"A batch of type {type(batch).__name__!r} cannot be counted and split by default. The default takes a "
            f"tensor, multiple Tensors of one length in a mapping, list or tuple, and lists of numbers or texts. Pass "
            f"split_batch and get_num_samples_in_batch to DataSpec for any other batch."
        )
    if not batch:
        return []
    return [len(batch)] if _is_primitives(batch) else _common(enumerate(batch))


def _common(parts: Iterable[tuple[Any, Any]], scalars: tuple[type, ...] = ()) -> list[int]:
    """Return the lengths that are possible for all parts."""
    found = {key: _lengths_of_part(key, part) for key, part in parts if not isinstance(part, scalars)}
    found = {key: lengths for key, lengths in found.items() if lengths is not None}
    common = list(next(iter(found.values()), ()))
    for lengths in found.values():
        common = [length for length in common if length in lengths]
    if found and not common:
        raise _LengthMismatch(
            f"The parts of the batch differ in length: { {key: lengths[0] for key, lengths in found.items()} }. "
            f"Splitting it would lose or mismatch samples. Make the parts equally long, or pass split_batch and "
            f"get_num_samples_in_batch to DataSpec."
        )
    return common


def _lengths_of_part(key: Any, part: Any) -> list[int] | None:
    if _is_array(part):
        return [_rows(part)]
    if isinstance(part, Mapping):
        return _lengths(part) or None  # a mapping of single values has no length, so it fits any batch
    if not _is_sequence(part):
        raise ValueError(
            f"Unable to determine the number of samples: the part of the batch at {key!r} is {part!r} of type "
            f"{type(part).__name__!r}, which the default cannot cut. It takes tensors, lists, tuples and mappings, and "
            f"single values in mappings. Pass split_batch and get_num_samples_in_batch to DataSpec for any other batch."
        )
    # A list of tensors may hold one item per sample, or be several columns with one row per sample.
    rows = _length_of_tensors(part)
    return [len(part), rows] if rows else [len(part)]


def _whole(batch: Any) -> Any:
    """Convert a batch that is not split to the type that microbatches have."""
    if isinstance(batch, Mapping):
        return dict(cast("Mapping[Any, Any]", batch))
    # A list of columns becomes a tuple, like the microbatches of a batch that is split.
    if not isinstance(batch, list) or not batch or _is_primitives(cast("list[Any]", batch)):
        return cast(Any, batch)
    return tuple(cast("list[Any]", batch))


def _cut(batch: Any, length: int, size: int) -> list[Any]:
    """Split a batch that `_lengths` has checked and that is longer than `size`."""
    if isinstance(batch, Mapping):
        num_chunks = -(-length // size)
        columns_of = {
            key: [value] * num_chunks if isinstance(value, _SCALARS) else _cut_item(value, length, size)
            for key, value in cast("Mapping[Any, Any]", batch).items()
        }
        return [{key: column[index] for key, column in columns_of.items()} for index in range(num_chunks)]
    if _is_array(batch) or _is_primitives(batch):
        return _slices(batch, size)
    columns = [_cut_item(item, length, size) for item in batch]
    make: Any = getattr(cast(Any, type(batch)), "_make", tuple)  # preserves the type of a namedtuple
    return [make(row) for row in zip(*columns, strict=True)]


def _cut_item(item: Any, length: int, size: int) -> Sequence[Any]:
    # A list with one item per sample is split by items; otherwise it contains columns, which are split by rows.
    return split_list(item, size) if _is_sequence(item) and len(item) == length else _cut(item, length, size)


def _slices(batch: Any, size: int) -> list[Any]:
    return list(batch.split(size)) if is_tensor(batch) else split_list(batch, size)


def split_list(sequence: Sequence[Any], microbatch_size: int) -> list[Any]:
    """Split a sequence into slices of `microbatch_size` items; the last one takes the remainder."""
    return [sequence[start : start + microbatch_size] for start in range(0, len(sequence), microbatch_size)]


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, without importing torch."""
    torch = loaded("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape")


def _is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple))


def _is_primitives(values: Sequence[Any]) -> bool:
    kinds = set(map(type, values))
    return len(kinds) == 1 and kinds.pop() in _SCALARS


def _rows(array: Any) -> int:
    if not len(array.shape):
        raise ValueError(
            f"Unable to determine the number of samples in {array!r}: a tensor without dimensions cannot be split into "
            f"microbatches. Give it a first dimension, one row per sample."
        )
    return int(array.shape[0])


_INDEX = (int,)


def batch_get(batch: Any, key: Any) -> Any:
    """Return one or several parts of a batch.

    Args:
        batch: Any container: tuple, list, dict, namedtuple, tensor, array, or an object with attributes.
        key: An index, a key, a slice or an attribute's name; a sequence of these, which returns a tuple; a function of
            the batch; or a pair of functions `(getter, setter)`, of which the getter is called.

    Raises:
        KeyError: If a mapping does not have the key.
        ValueError: If a sequence of functions is not a pair.

    Example:
        >>> batch_get({"image": 1, "label": 2}, "label")
        2
        >>> batch_get(("x", "y", "z"), [0, 2])
        ('x', 'z')
    """
    # The common case, once per forward pass: the type checks below take longer than reading the item.
    if type(key) in _INDEX and type(batch) in (tuple, list):
        return batch[key]
    if _is_functions(key):
        return _pair(key)[0](batch)
    if callable(key):
        return key(batch)
    if isinstance(batch, Mapping):
        named = cast("Mapping[Any, Any]", batch)
        if not isinstance(key, Sequence) or isinstance(key, str) or _has_key(named, key):
            return _get_present(named, key)
        return tuple(_get_present(named, one_key) for one_key in cast("Sequence[Any]", key))
    try:
        return itemgetter(key)(batch)
    except IndexError:
        # An array raises IndexError for the name of an attribute, too, which is tried below.
        if isinstance(key, (int, slice)):
            raise
    except TypeError:
        pass
    try:
        # A sequence of keys, or an attribute's name, of which itemgetter(*key) would read each letter.
        return _in_tuple(key, itemgetter(*key)(batch))
    except TypeError:
        pass
    try:
        return attrgetter(key)(batch)
    except TypeError:
        return _in_tuple(key, attrgetter(*key)(batch))


def batch_set(batch: Any, key: Any, value: Any) -> Any:
    """Replace one or several parts of a batch.

    Args:
        batch: Lists, mappings, tensors, arrays and objects are changed in place; a tuple or namedtuple is copied.
        key: As for `batch_get`. A function is called as `key(batch, value)`; of a pair the setter is called likewise.
        value: The new value. With a sequence of keys, a sequence with one value per key.

    Returns:
        The batch, or a new tuple. Assign the result: `state.batch = batch_set(state.batch, key, value)`.

    Raises:
        KeyError: If a mapping does not have the key; keys are never added.
        ValueError: If the numbers of values and keys differ, or a sequence of functions is not a pair.
        RuntimeError: If the batch can be changed neither by item nor by attribute.

    Example:
        >>> batch_set(("image", "label"), 1, "smooth label")
        ('image', 'smooth label')
    """
    if _is_functions(key):
        return _pair(key)[1](batch, value)
    if callable(key):
        return key(batch, value)
    if isinstance(key, Sequence) and not isinstance(key, str):
        return _set_many(batch, cast("Sequence[Any]", key), value)
    return _set_one(batch, key, value)


def _get_present(batch: Mapping[Any, Any], key: Any) -> Any:
    # Checked first, because reading a missing key adds it to a defaultdict and returns 0 from a Counter.
    if not _has_key(batch, key):
        raise KeyError(key)
    return batch[key]


def _has_key(batch: Mapping[Any, Any], key: Any) -> bool:
    try:
        return key in batch.keys()  # noqa: SIM118  # a TensorDict supports `in` only for its keys
    except TypeError:  # a list or a slice cannot be hashed, so it cannot be a key
        return False


def _in_tuple(keys: Any, found: Any) -> Any:
    """Wrap the single value that `itemgetter` and `attrgetter` return for one key in a tuple, as for several keys."""
    return (found,) if len(keys) == 1 else found


def _is_functions(key: Any) -> bool:
    if isinstance(key, str) or not isinstance(key, Sequence) or not key:
        return False
    return all(map(callable, cast("Sequence[Any]", key)))


def _pair(key: Sequence[Callable[..., Any]]) -> Sequence[Callable[..., Any]]:
    if len(key) != 2:
        raise ValueError(
            f"key={key!r} holds {len(key)} functions. A batch key of functions is a pair: (getter, setter)."
        )
    return key


def _set_many(batch: Any, keys: Sequence[Any], value: Any) -> Any:
    # Tensors and arrays accept a sequence of indices as one key; other containers fail here before they are changed.
    try:
        return _set_item(batch, keys, value)
    except (IndexError, TypeError, KeyError):
        pass
    if isinstance(value, str) or not isinstance(value, Sized) or len(value) != len(keys):
        raise ValueError(
            f"value={value!r} does not fit the {len(keys)} keys {keys!r}: give a sequence with one value for each key."
        )
    for one_key, one_value in zip(keys, cast("Sequence[Any]", value), strict=True):
        batch = _set_one(batch, one_key, one_value)
    return batch


def _set_one(batch: Any, key: Any, value: Any) -> Any:
    if isinstance(batch, tuple):
        return _set_in_tuple(cast("tuple[Any, ...]", batch), key, value)
    try:
        return _set_item(batch, key, value)
    except TypeError as error:
        # Any other TypeError is about the value or the key, and belongs to the user.
        if not any(text in str(error) for text in ("not subscriptable", "does not support item assignment")):
            raise
    try:
        getattr(batch, key)  # an attribute is replaced, never added
        setattr(batch, key, value)
    except (AttributeError, TypeError) as error:
        raise RuntimeError(
            f"key={key!r} cannot be set on a batch of type {type(batch).__name__!r}: it has neither such an item nor "
            f"such an attribute that can be assigned. Pass a pair of functions (getter, setter) as the key."
        ) from error
    return batch


def _set_item(batch: Any, key: Any, value: Any) -> Any:
    # Checked first, because an assignment would add a missing key.
    if isinstance(batch, Mapping):
        if not _has_key(cast("Mapping[Any, Any]", batch), key):
            raise KeyError(key)
    else:
        batch[key]
    setitem(cast(Any, batch), key, value)
    return cast(Any, batch)


def _set_in_tuple(batch: tuple[Any, ...], key: Any, value: Any) -> tuple[Any, ...]:
    named: Any = batch if hasattr(batch, "_fields") else None
    if isinstance(key, str):
        if named is None or key not in named._fields:
            raise RuntimeError(
                f"key={key!r} cannot be set on a batch of type {type(batch).__name__!r}: a tuple's parts are set by "
                f"index or slice, and a namedtuple's also by the names of its fields."
            )
        return named._replace(**{key: value})
    items = list(batch)
    items[key] = value
    return tuple(items) if named is None else named._make(items)


def ensure_tuple(x: Any) -> tuple[Any, ...]:
    """Convert a value or a collection of values to a tuple.

    Args:
        x: `None` gives `()`, a sequence its items, a mapping its values. Text, bytes and everything else, including
            tensors, arrays and sets, count as one element.

    Example:
        >>> ensure_tuple(None), ensure_tuple("ab"), ensure_tuple([1, 2])
        ((), ('ab',), (1, 2))
    """
    if x is None:
        return ()
    if isinstance(x, (str, bytes, bytearray)):
        return (x,)
    if isinstance(x, (tuple, list, Sequence)):  # the common types first: an ABC check takes ten times as long
        return tuple(cast("Sequence[Any]", x))
    if isinstance(x, Mapping):
        return tuple(cast("Mapping[Any, Any]", x).values())
    return (x,)


def innermost_dataloader(holder: Any) -> Any:
    """Return the dataloader inside a `DataSpec` or an `Evaluator`."""
    for _ in range(2):  # at most Evaluator and DataSpec; an object with every attribute, such as a mock, never ends
        holder = getattr(holder, "dataloader", holder)
    return holder


def length_or_none(sized: object) -> int | None:
    """Return the length of a dataset or dataloader, or `None` if it is unknown."""
    if not isinstance(sized, Sized):
        return None
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # those over iterable datasets have a __len__ that raises
        return None


def map_collection(collection: Any, map_fn: Callable[[Any], Any]) -> Any:
    """Apply a function to the elements of a tuple, list or dict, or to a single value.

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
        if hasattr(items, "_make"):  # a namedtuple's constructor takes each field as an argument
            return cast(Any, type(items))._make(mapped)
        return cast(Any, type(items))(mapped)
    if isinstance(collection, dict):
        return {key: map_fn(value) for key, value in cast("dict[Any, Any]", collection).items()}
    return map_fn(collection)


class IteratorFileStream(io.RawIOBase):
    """Readable binary file over an iterator of byte chunks.

    Wrap it in `io.BufferedReader` to read in other sizes than those of the chunks.

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
        """Fill `buffer` with available bytes, from at most one chunk, and return their number; 0 means the end."""
        target = memoryview(buffer).cast("B")
        if not target:
            return 0
        # Empty chunks are skipped: returning 0 for one would mean the end of the file.
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
        """Return True."""
        return True


def iterate_with_callback(
    iterator: Iterable[bytes], total_len: int, callback: Callable[[int, int], None] | None = None
) -> Iterator[bytes]:
    """Yield chunks and report how many bytes have been yielded.

    Args:
        iterator: Yields chunks.
        total_len: The sum of their lengths, passed to `callback`.
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
