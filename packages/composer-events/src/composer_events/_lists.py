"""Lists that count their changes, and a descriptor that keeps one list per instance."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

from composer_events.batches import ensure_tuple

T = TypeVar("T")


class VersionedList(list[T]):
    """List with a `version` that increases with every change, so that derived data can be cached.

    Changes inside an item do not count. A state keeps each such list for its lifetime and replaces only the contents,
    so a reference to the list stays valid.

    Example:
        >>> numbers = VersionedList([2, 1])
        >>> before = numbers.version
        >>> numbers.sort()
        >>> numbers.version > before
        True
    """

    # A class attribute, because pickle and copy fill the list before the instance has attributes.
    version: int = 0


def _counting(name: str) -> Callable[..., Any]:
    """Return a method of `list` that counts the change first."""
    method: Callable[..., Any] = getattr(list, name)

    @functools.wraps(method)
    def counted(self: VersionedList[Any], *args: Any, **kwargs: Any) -> Any:
        self.version += 1  # first, because a failing `extend` or `sort` may have changed the list
        return method(self, *args, **kwargs)

    return counted


# All methods that change a list: a missing one would leave caches stale.
for _name in ("append", "extend", "insert", "remove", "pop", "clear", "reverse", "sort"):
    setattr(VersionedList, _name, _counting(_name))
for _name in ("__setitem__", "__delitem__", "__iadd__", "__imul__"):
    setattr(VersionedList, _name, _counting(_name))


L = TypeVar("L", bound=VersionedList[Any])


class SteppingList(VersionedList[Any]):
    """Optimizers or schedulers. `step` and `zero_grad` apply to each, so a loop written for one works with several."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step every item in order and return the result of the last one."""
        result = None
        for item in self:
            result = item.step(*args, **kwargs)
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients of every optimizer."""
        for item in self:
            item.zero_grad(*args, **kwargs)


class OptimizerList(SteppingList):
    """Optimizers, at least one of which must exist when `step` is called."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step every optimizer in order and return the result of the last one."""
        if not self:
            raise RuntimeError(
                "state.optimizers=[] has nothing to step, so no weight would change. Set one before training, such as "
                "state.optimizers = torch.optim.SGD(state.model.parameters(), lr=0.1)."
            )
        return super().step(*args, **kwargs)

    def train(self) -> None:
        """Switch optimizers with modes, such as schedule-free ones, to the weights that are trained."""
        for optimizer in self.with_modes():
            optimizer.train()

    def eval(self) -> None:
        """Switch optimizers with modes, such as schedule-free ones, to the weights to evaluate, save or export."""
        for optimizer in self.with_modes():
            optimizer.eval()

    def with_modes(self) -> list[Any]:
        """Return the optimizers that have `train()` and `eval()`, which exchange the weights of the model."""
        inner = [getattr(each, "base_optimizer", each) for each in self]  # of wrappers such as SAM's
        return [each for each in inner if hasattr(each, "train") and hasattr(each, "eval")]


class StableListAttribute(Generic[L]):
    """Descriptor of a list attribute: assignment replaces the contents and keeps the list object.

    One object, a sequence of objects, or `None` for an empty list may be assigned. The instance must first store its
    list in `__dict__` under the attribute's name.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> StableListAttribute[L]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> L: ...
    def __get__(self, instance: object, owner: type) -> Any:
        return self if instance is None else instance.__dict__[self._name]

    def __set__(self, instance: object, items: Any) -> None:
        kept = instance.__dict__.get(self._name)
        if kept is None:
            raise AttributeError(f"The list {self._name!r} does not exist yet. Call State.__init__ first.")
        kept[:] = ensure_tuple(items)

    def __delete__(self, instance: object) -> None:
        # Scripts that train several models delete every attribute of the state to free memory.
        del instance.__dict__[self._name]
