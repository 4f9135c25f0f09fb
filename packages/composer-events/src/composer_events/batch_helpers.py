"""Reading and replacing one part of a batch, whatever kind of container the batch is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from operator import attrgetter, itemgetter, setitem
from typing import Any, cast

__all__ = ["batch_get", "batch_set"]

_INDEX = (int,)


def batch_get(batch: Any, key: Any) -> Any:
    """Read one or several parts of a batch.

    Args:
        batch: Any container: tuple, list, dict, namedtuple, tensor, array, or an object with attributes.
        key: An index, a key, a slice or an attribute's name; a sequence of them, which gives a tuple; a function of
            the batch; or a pair of functions `(getter, setter)`, of which the first is called.

    Raises:
        KeyError: If a mapping does not have the key.
        ValueError: If a sequence of functions is not a pair.

    Example:
        >>> batch_get({"image": 1, "label": 2}, "label")
        2
        >>> batch_get(("x", "y", "z"), [0, 2])
        ('x', 'z')
    """
    # The usual one, which each forward pass asks for; what something is, takes longer to find out than to read it.
    if type(key) in _INDEX and type(batch) in (tuple, list):
        return batch[key]
    if _is_functions(key):
        return _pair(key)[0](batch)
    if callable(key):
        return key(batch)
    if isinstance(batch, Mapping):
        return _get_from_mapping(cast("Mapping[Any, Any]", batch), key)
    try:
        return itemgetter(key)(batch)
    except IndexError:
        if isinstance(key, (int, slice)):
            raise
    except TypeError:
        pass
    try:
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
        key: As for `batch_get`. A function is called as `key(batch, value)`; of a pair the second is called so.
        value: What to put there. With a sequence of keys, a sequence of as many values.

    Returns:
        The batch, or the new tuple. Keep it: `state.batch = batch_set(state.batch, key, value)`.

    Raises:
        KeyError: If a mapping does not have the key; none is ever added.
        ValueError: If the values are not as many as the keys, or a sequence of functions is not a pair.
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


def _get_from_mapping(batch: Mapping[Any, Any], key: Any) -> Any:
    if not isinstance(key, Sequence) or isinstance(key, str) or _has_key(batch, key):
        return _get_present(batch, key)
    return tuple(_get_present(batch, one_key) for one_key in cast("Sequence[Any]", key))


def _get_present(batch: Mapping[Any, Any], key: Any) -> Any:
    # Asked for first, since a defaultdict adds what is read, and a Counter counts what is not there as 0.
    if not _has_key(batch, key):
        raise KeyError(key)
    return batch[key]


def _has_key(batch: Mapping[Any, Any], key: Any) -> bool:
    try:
        return key in batch.keys()  # noqa: SIM118  # a TensorDict answers this question only for its keys
    except TypeError:  # a list or a slice, which cannot be hashed, is nobody's key
        return False


def _in_tuple(keys: Any, found: Any) -> Any:
    """Give one part found by a sequence of one key the form that several have."""
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
    # Tensors and arrays take a sequence of indices as one key; other containers fail here before they are changed.
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
        if not any(text in str(error) for text in ("not subscriptable", "does not support item assignment")):
            raise
    try:
        getattr(batch, key)
        setattr(batch, key, value)
    except (AttributeError, TypeError) as error:
        raise RuntimeError(
            f"key={key!r} cannot be set on a batch of type {type(batch).__name__!r}: it has neither such an item nor "
            f"such an attribute that can be assigned. Pass a pair of functions (getter, setter) as the key."
        ) from error
    return batch


def _set_item(batch: Any, key: Any, value: Any) -> Any:
    # A key that is not there must not be added.
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
