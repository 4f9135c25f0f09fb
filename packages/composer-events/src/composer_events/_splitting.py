"""Count the samples of a batch of a usual kind, and cut it into microbatches, by one rule."""

from __future__ import annotations

import inspect
import operator
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard, cast

from composer_events.iter_helpers import ensure_tuple

__all__ = ["count_samples", "default_split_batch", "split_batch_by_count", "split_list"]

# One value that belongs to every sample of a mapping, such as a task's name.
_SCALARS = (int, float, str, bool)


def count_samples(batch: Any) -> int:
    """Return the number of samples in a batch, which may be any that `default_split_batch` can cut.

    Anything with a `shape` counts as a tensor, so that torch need not be loaded.

    Raises:
        ValueError: If some part of the batch has no length.
        NotImplementedError: If the batch is neither a tensor, a tuple, a list nor a mapping, or if its parts differ in
            length, or there is none.
    """
    if type(batch) in (tuple, list) and (length := _length_of_tensors(batch)):  # the usual kind
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
    """Cut a batch into microbatches of one size; the last one takes what is left.

    | batch | microbatches |
    |---|---|
    | tensor | its slices along dim 0 |
    | mapping | dicts: tensors, lists and nested mappings cut, single values (number, text) in every one |
    | sequence of numbers or of texts | its slices |
    | other tuple or list | tuples of the slices of its items: tensors, lists, tuples, mappings |

    A batch shorter than one microbatch is one microbatch, with a warning.

    Args:
        batch: All its parts have the same length.
        microbatch_size: How many samples a microbatch has, 1 or more.

    Raises:
        ValueError: If the size is no whole number, parts differ in length, or a part cannot be cut.
        NotImplementedError: If the batch is none of the above.

    Example:
        >>> default_split_batch(["a", "b", "c"], 2)
        [['a', 'b'], ['c']]
    """
    if type(batch) in (tuple, list) and type(microbatch_size) is int:  # the usual kind, without a further question
        length = _length_of_tensors(batch)
        if length == microbatch_size > 0:
            return [tuple(batch)]
        if length > microbatch_size > 0:
            return list(zip(*[_slices(item, microbatch_size) for item in batch], strict=True))
    microbatch_size = _whole_number(microbatch_size)
    length = next(iter(_lengths(batch)), None)
    if length is None or length == microbatch_size:  # nothing that can be cut, or nothing to cut: the usual case
        return [_whole(batch)]
    if length < microbatch_size:
        kind = "tensor" if any(map(_is_tensor, (batch, *ensure_tuple(batch)))) else "list"
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
    """Return the `stacklevel`, for the function that asks, of the line that asked Composer to cut or to train."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_ours(module: str) -> bool:
    package = module.partition(".")[0]
    return package == "composer" or package.startswith("composer_")


def split_batch_by_count(batch: Any, num_microbatches: int) -> Sequence[Any]:
    """Cut a batch into so many microbatches of equal size, as `torch.chunk` does.

    If the length is not divisible, the last one is shorter and there may be fewer. A batch with fewer samples than
    `num_microbatches` gives one microbatch a sample, with a warning.

    Args:
        batch: As for `default_split_batch`.
        num_microbatches: 1 or more.

    Raises:
        ValueError: If `num_microbatches` is below 1, and as `default_split_batch` does.
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
    return default_split_batch(batch, max(1, -(-(length or 1) // num_microbatches)))


def _whole_number(microbatch_size: int | float) -> int:
    try:
        if isinstance(microbatch_size, bool):
            raise TypeError
        size = operator.index(cast(Any, microbatch_size))  # NumPy's integers are numbers too
    except TypeError:
        raise ValueError(
            f"microbatch_size={microbatch_size!r} is not a whole number, and the default way to split a batch needs "
            f"one. Pass split_batch to DataSpec for batches that can be cut inside a sample."
        ) from None
    if size < 1:
        raise ValueError(f"microbatch_size={size} is not a size: a microbatch has 1 sample or more.")
    return size


def _length_of_tensors(batch: Sequence[Any]) -> int:
    """Return the common length of a tuple or list of tensors and nothing else; 0 for any other batch."""
    length: int | None = None
    for item in batch:
        shape = getattr(item, "shape", None)
        if not shape or (length is not None and shape[0] != length):
            return 0
        length = shape[0]
    return int(length or 0)


class _LengthMismatch(ValueError):
    """The parts of a batch have no length in common."""


def _lengths(batch: Any) -> list[int]:
    """Return the lengths that a batch can be taken to have; none where it holds nothing to cut.

    There are two where all parts are lists of tensors: one item per sample or, last, one row of each tensor per sample.
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
    """Return the lengths that all parts can have."""
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
        return _lengths(part) or None
    if not _is_sequence(part):
        raise ValueError(
            f"Unable to determine the number of samples: the part of the batch at {key!r} is {part!r} of type "
            f"{type(part).__name__!r}, which the default cannot cut. It takes tensors, lists, tuples and mappings, and "
            f"single values in mappings. Pass split_batch and get_num_samples_in_batch to DataSpec for any other batch."
        )
    rows = _length_of_tensors(part)
    return [len(part), rows] if rows else [len(part)]


def _whole(batch: Any) -> Any:
    """The batch in the form that a microbatch has."""
    if isinstance(batch, Mapping):
        return dict(cast("Mapping[Any, Any]", batch))
    if not isinstance(batch, list) or not batch or _is_primitives(cast("list[Any]", batch)):
        return cast(Any, batch)
    return tuple(cast("list[Any]", batch))


def _cut(batch: Any, length: int, size: int) -> list[Any]:
    """Cut a batch that `_lengths` has checked and found longer than `size`."""
    if isinstance(batch, Mapping):
        return _cut_mapping(cast("Mapping[Any, Any]", batch), length, size)
    if _is_array(batch) or _is_primitives(batch):
        return _slices(batch, size)
    columns = [_cut_item(item, length, size) for item in batch]
    make: Any = getattr(cast(Any, type(batch)), "_make", tuple)  # a namedtuple keeps its names
    return [make(row) for row in zip(*columns, strict=True)]


def _cut_item(item: Any, length: int, size: int) -> Sequence[Any]:
    return split_list(item, size) if _is_sequence(item) and len(item) == length else _cut(item, length, size)


def _slices(batch: Any, size: int) -> list[Any]:
    return list(batch.split(size)) if _is_tensor(batch) else split_list(batch, size)


def _cut_mapping(batch: Mapping[Any, Any], length: int, size: int) -> list[Any]:
    num_chunks = -(-length // size)
    columns = {
        key: [value] * num_chunks if isinstance(value, _SCALARS) else _cut_item(value, length, size)
        for key, value in batch.items()
    }
    return [{key: column[index] for key, column in columns.items()} for index in range(num_chunks)]


def split_list(sequence: Sequence[Any], microbatch_size: int) -> list[Any]:
    """Cut a sequence into slices of `microbatch_size` items; the last one takes the remainder."""
    return [sequence[start : start + microbatch_size] for start in range(0, len(sequence), microbatch_size)]


def _is_tensor(value: Any) -> bool:
    # A process that has not imported torch has no tensors, and must not pay for the question.
    torch = sys.modules.get("torch")
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
