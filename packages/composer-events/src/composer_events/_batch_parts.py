"""`state.inputs` and `state.targets`: a batch that a loop written by hand takes apart, and algorithms see as one."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["BatchInParts"]

_NAMES: Final = ("inputs", "targets")


class BatchPart:
    """A descriptor for one of the two parts of a batch of inputs and targets; see `BatchInParts`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._index = _NAMES.index(name)

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        if self._name not in instance.__dict__:
            raise self._missing(instance)
        return instance.batch[self._index] if _is_paired(instance) else instance.__dict__[self._name]

    def __set__(self, instance: Any, value: Any) -> None:
        own: dict[str, Any] = instance.__dict__
        own[self._name] = value
        if _is_paired(instance):
            parts = list(instance.batch)
            parts[self._index] = value
            instance.batch = tuple(parts)
        elif own["num_running_events"] == 0:
            _take_from_loop(instance, self._name)

    def __delete__(self, instance: Any) -> None:
        if self._name not in instance.__dict__:
            raise self._missing(instance)
        del instance.__dict__[self._name]
        instance.__dict__["_is_loop_of_pairs"] = False

    def _missing(self, instance: Any) -> AttributeError:
        message = f"{type(instance).__name__!r} object has no attribute {self._name!r}"
        return AttributeError(message, name=self._name, obj=instance)


class BatchInParts:
    """The part of `State` that holds `inputs` and `targets`.

    In a loop such as `for state.inputs, state.targets in dataloader:` nobody sets `state.batch`, which is what
    algorithms read and replace. So once a loop has given both parts while there was no batch, the batch is the pair of
    them: assigning a part replaces it in the batch, and reading a part reads it there. Where an algorithm or another
    loop has put something else in its place, the next pair is the batch again.

    With a Trainer, which sets `state.batch` itself, both are attributes like any that a user adds. So they are where
    algorithms and callbacks assign them, and where one of them is `None`, until a loop begins as above.
    """

    batch: Any
    inputs = BatchPart()
    targets = BatchPart()

    def _begin_without_parts(self) -> None:
        # The engine counts, so that what algorithms and callbacks assign is told from what the loop does.
        self.num_running_events = 0
        self._is_loop_of_pairs = False
        self._new_parts: frozenset[str] = frozenset()


def _take_from_loop(instance: Any, name: str) -> None:
    """Make a batch of the parts that the loop has given, if both are new and nobody else gives it batches."""
    own: dict[str, Any] = instance.__dict__
    new = own["_new_parts"] | {name}
    is_whole = len(new) == len(_NAMES)
    own["_new_parts"] = frozenset() if is_whole else new
    if not is_whole or any(own.get(part) is None for part in _NAMES):
        return
    if instance.batch is None or own["_is_loop_of_pairs"]:
        own["_is_loop_of_pairs"] = True
        instance.batch = tuple(own[part] for part in _NAMES)


def _is_paired(instance: Any) -> bool:
    if not instance.__dict__["_is_loop_of_pairs"]:
        return False
    batch = instance.batch
    return type(batch) in (tuple, list) and len(batch) == len(_NAMES)
