"""Tensors out of a batch of any form, or an error that names the key."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from composer_events.state import State


class UnsupportedBatchError(TypeError, NotImplementedError):
    """The batch, the model's output or the loss is not of a kind that the algorithm can work on.

    A `TypeError`; also a `NotImplementedError`, which is what scripts written for Composer catch.
    """


def batch_tensor(state: "State", key: Any, argument: str) -> Tensor:
    """Return the tensor that `key` picks from `state.batch`; `argument` is what the user calls that key.

    A batch that is a tensor itself has no parts to replace: an index would pick an example, and replacing that would
    write into the caller's data. Functions as the key may do with it what they like.
    """
    if isinstance(state.batch, Tensor) and not _is_getter_and_setter(key):
        raise UnsupportedBatchError(
            f"{argument}={key!r} would pick single values from the batch, which is one tensor of shape "
            f"{tuple(state.batch.shape)}: let the dataloader give (inputs, targets) or a dict, or pass a (getter, "
            f"setter) pair of functions as {argument}."
        )
    try:
        value = state.batch_get_item(key)
    except (LookupError, AttributeError, TypeError) as error:
        raise UnsupportedBatchError(
            f"{argument}={key!r} picks nothing from a batch of type {type(state.batch).__qualname__}: pass the index, "
            f"the key, or a (getter, setter) pair under which your batches hold it."
        ) from error
    return require_tensor(value, f"what {argument}={key!r} picks from the batch")


def _is_getter_and_setter(key: Any) -> bool:
    return isinstance(key, Sequence) and len(key) == 2 and all(map(callable, key))


def require_tensor(value: object, what: str) -> Tensor:
    """Return `value` if it is a tensor; `what` says in the error where it came from."""
    if isinstance(value, Tensor):
        return value
    raise UnsupportedBatchError(
        f"{what} is a {type(value).__qualname__}, but this algorithm works on one tensor: choose the tensor by the "
        f"algorithm's keys, or leave the algorithm out for this model."
    )
