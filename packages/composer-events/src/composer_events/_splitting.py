"""Cutting a batch of a usual kind into microbatches."""

from __future__ import annotations

import inspect
import operator
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard, cast

from composer_events.iter_helpers import ensure_tuple

__all__ = ["default_split_batch", "split_batch_by_count", "split_list"]

# One value that belongs to every sample of a mapping, such as a task's name.
_SCALARS = (int, float, str, bool)


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
            return list(zip(*[item.split(microbatch_size) for item in batch], strict=True))
    microbatch_size = _whole_number(microbatch_size)
    length = _length(batch)
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
    length = _length(batch)
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
    """The common length of a tuple or list that holds tensors and nothing else; 0 for any other."""
    length: int | None = None
    for item in batch:
        if not _is_tensor(item) or not item.ndim or (length is not None and item.shape[0] != length):
            return 0
        length = item.shape[0]
    return length or 0


def _length(batch: Any) -> int | None:
    """The common length of all that can be cut; None when nothing can."""
    if _is_tensor(batch):
        return _tensor_length(batch)
    if isinstance(batch, Mapping):
        return _one_length(_lengths_of_values(cast("Mapping[Any, Any]", batch)))
    if not _is_sequence(batch):
        raise NotImplementedError(
            f"The default way to split a batch cannot cut one of type {type(batch).__name__!r}. It knows tensors, "
            f"mappings, lists and tuples. Pass split_batch to DataSpec for any other batch."
        )
    if not batch:
        return None
    if _is_primitives(batch):
        return len(batch)
    return _one_length(_lengths_of_items(batch))


def _lengths_of_values(batch: Mapping[Any, Any]) -> Iterable[tuple[Any, int | None]]:
    for key, value in batch.items():
        if _is_tensor(value):
            yield key, _tensor_length(value)
        elif isinstance(value, _SCALARS):
            yield key, None
        elif isinstance(value, Mapping):
            yield key, _one_length(_lengths_of_values(cast("Mapping[Any, Any]", value)))
        elif _is_sequence(value):
            yield key, len(value)
        else:
            raise ValueError(_cannot_cut(key, value))


def _lengths_of_items(batch: Sequence[Any]) -> Iterable[tuple[Any, int | None]]:
    for index, item in enumerate(batch):
        if _is_tensor(item):
            yield index, _tensor_length(item)
        elif isinstance(item, Mapping):
            yield index, _one_length(_lengths_of_values(cast("Mapping[Any, Any]", item)))
        elif _is_sequence(item):
            yield index, len(item)
        else:
            raise ValueError(_cannot_cut(index, item))


def _one_length(lengths: Iterable[tuple[Any, int | None]]) -> int | None:
    known = {key: length for key, length in lengths if length is not None}
    if len(set(known.values())) > 1:
        raise ValueError(
            f"The parts of the batch differ in length: {known}. Samples would be lost or mismatched by splitting it. "
            f"Make the parts equally long, or pass split_batch to DataSpec."
        )
    return next(iter(known.values()), None)


def _whole(batch: Any) -> Any:
    """The batch in the form that a microbatch has."""
    if isinstance(batch, Mapping):
        return dict(cast("Mapping[Any, Any]", batch))
    if not isinstance(batch, list) or not batch or _is_primitives(cast("list[Any]", batch)):
        return cast(Any, batch)
    return tuple(cast("list[Any]", batch))


def _cut(batch: Any, length: int, size: int) -> list[Any]:
    """Cut what `_length` has checked and found longer than `size`."""
    if _is_tensor(batch):
        return list(batch.split(size))
    if isinstance(batch, Mapping):
        return _cut_mapping(cast("Mapping[Any, Any]", batch), length, size)
    sequence = cast("Sequence[Any]", batch)
    if _is_primitives(sequence):
        return split_list(sequence, size)
    columns = [_cut_item(item, length, size) for item in sequence]
    make = getattr(type(sequence), "_make", tuple)  # a namedtuple keeps its names
    return [make(row) for row in zip(*columns, strict=True)]


def _cut_item(item: Any, length: int, size: int) -> Sequence[Any]:
    if _is_tensor(item):
        return item.split(size)
    if isinstance(item, Mapping):
        return _cut_mapping(cast("Mapping[Any, Any]", item), length, size)
    return split_list(item, size)


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


def _is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple))


def _is_primitives(values: Sequence[Any]) -> bool:
    kinds = set(map(type, values))
    return len(kinds) == 1 and kinds.pop() in _SCALARS


def _tensor_length(tensor: Any) -> int:
    if not tensor.ndim:
        raise ValueError(f"A tensor without dimensions, {tensor!r}, cannot be split into microbatches.")
    return int(tensor.shape[0])


def _cannot_cut(where: Any, value: Any) -> str:
    return (
        f"The part of the batch at {where!r} is a {type(value).__name__!r}, which the default way to split a batch "
        f"cannot cut. It knows tensors, lists, tuples and mappings. Pass split_batch to DataSpec for any other batch."
    )
