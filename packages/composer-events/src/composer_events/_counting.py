"""How many samples and tokens a batch of a usual kind holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

from composer_events.iter_helpers import ensure_tuple

__all__ = ["count_samples", "count_tokens"]


_HANDLED: Final = (
    "The default count handles one tensor, or multiple Tensors whose first dimensions are equal, in a sequence or a "
    "mapping. Pass get_num_samples_in_batch to DataSpec for any other batch."
)


def count_samples(batch: Any) -> int:
    """Answer the length of a batch's first dimension.

    Whatever has a `shape` counts as a tensor, so that torch need not be loaded to ask.

    Raises:
        ValueError: If some part of the batch has no shape.
        NotImplementedError: If the batch is neither a tensor, a tuple, a list nor a mapping, or if its parts differ in
            length, or there is none.
    """
    if type(batch) in (tuple, list) and (length := _length_of_all(batch)) is not None:
        return length
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return _first_dimension(batch, shape)
    if isinstance(batch, (tuple, list)):
        lengths = set(_lengths_in_sequence(cast("Sequence[Any]", batch)))
    elif isinstance(batch, Mapping):
        lengths = set(_lengths_in_mapping(cast("Mapping[Any, Any]", batch)))
    else:
        raise NotImplementedError(f"The batch is of type {type(batch).__name__!r}. {_HANDLED}")
    if len(lengths) == 1:
        return lengths.pop()
    found = "nothing that has a length" if not lengths else f"parts of length {sorted(lengths)}"
    raise NotImplementedError(f"The batch holds {found}. {_HANDLED}")


def count_tokens(batch: Any, max_sequence_length: int | None, num_samples: int | float) -> int:
    """Answer the product of the first two dimensions of `input_ids`, or samples times the greatest length, or 0.

    Padding is counted too.
    """
    # Whether something is a Mapping takes long to find out of what is none.
    if type(batch) not in (list, tuple) and isinstance(batch, Mapping) and "input_ids" in batch:
        input_ids: Any = cast("Mapping[str, Any]", batch)["input_ids"]
        shape = getattr(input_ids, "shape", None)
        if shape is None:
            return sum(map(len, input_ids))
        return int(shape[0]) * (int(shape[1]) if len(shape) > 1 else 1)
    if max_sequence_length is not None:
        return int(max_sequence_length * num_samples)
    return 0


def _length_of_all(batch: Sequence[Any]) -> int | None:
    """Return the length of each of the tensors that a batch consists of, `None` if it is any other batch."""
    length = None
    for item in batch:
        shape = getattr(item, "shape", None)
        if not shape or shape[0] != (shape[0] if length is None else length):
            return None
        length = shape[0]
    return None if length is None else int(length)


def _lengths_in_sequence(batch: Sequence[Any]) -> Iterator[int]:
    for item in batch:
        shape = getattr(item, "shape", None)
        if shape is not None:  # the usual (inputs, targets) leaves here
            yield _first_dimension(item, shape)
            continue
        for element in ensure_tuple(item):
            shape = getattr(element, "shape", None)
            if shape is None:
                raise ValueError(_unable(element))
            yield _first_dimension(element, shape)


def _lengths_in_mapping(batch: Mapping[Any, Any]) -> Iterator[int]:
    for key, value in batch.items():
        shape = getattr(value, "shape", None)
        if shape is not None:
            yield _first_dimension(value, shape)
        elif isinstance(value, (list, tuple)):
            yield len(cast("Sequence[Any]", value))
        else:
            raise ValueError(f"{_unable(value)} It is the value of key {key!r}.")


def _first_dimension(tensor: Any, shape: Any) -> int:
    if not len(shape):
        raise ValueError(_unable(tensor))
    return int(shape[0])


def _unable(value: Any) -> str:
    return (
        f"Unable to determine the number of samples in a batch from {value!r} of type {type(value).__name__!r}. The "
        f"default count reads tensors, sequences of tensors, and mappings to tensors or lists. Pass "
        f"get_num_samples_in_batch to DataSpec for any other batch."
    )
