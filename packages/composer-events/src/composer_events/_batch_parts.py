"""`state.inputs` and `state.targets`: a batch that a loop written by hand takes apart, and algorithms see as one."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["BatchPart"]

_NAMES: Final = ("inputs", "targets")
_PAIRED: Final = "_has_paired_batch"


class BatchPart:
    """A descriptor for one of the two parts of a batch of inputs and targets.

    In a loop such as `for state.inputs, state.targets in dataloader:` nobody sets `state.batch`, which is what
    algorithms read and replace. So once both parts are given while there is no batch, the batch is the pair of them:
    assigning a part replaces it in the batch, and reading a part reads it there.

    Otherwise, as with a Trainer, which sets `state.batch` itself, both are attributes like any that a user adds.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._index = _NAMES.index(name)

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        if _is_pair(instance):
            return instance.batch[self._index]
        try:
            return instance.__dict__[self._name]
        except KeyError:
            message = f"{owner.__name__!r} object has no attribute {self._name!r}"
            raise AttributeError(message, name=self._name, obj=instance) from None

    def __set__(self, instance: Any, value: Any) -> None:
        own: dict[str, Any] = instance.__dict__
        own[self._name] = value
        if _is_pair(instance):
            parts = list(instance.batch)
            parts[self._index] = value
            instance.batch = tuple(parts)
        elif own.get("batch") is None and all(name in own for name in _NAMES):
            own[_PAIRED] = True
            instance.batch = tuple(own[name] for name in _NAMES)


def _is_pair(instance: Any) -> bool:
    if _PAIRED not in instance.__dict__:
        return False
    batch = instance.batch
    return type(batch) in (tuple, list) and len(batch) == len(_NAMES)
