"""An attribute that is one list for life."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, overload

from composer_events._watched_list import WatchedList
from composer_events.iter_helpers import ensure_tuple

__all__ = ["KeptList", "OptimizerList", "SteppingList"]

L = TypeVar("L", bound=WatchedList[Any])


class SteppingList(WatchedList[Any]):
    """Optimizers or schedulers: `step` and `zero_grad` go to each, so that a loop written for one serves several."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step every item in order; answer what the last one answered."""
        result = None
        for item in self:
            result = item.step(*args, **kwargs)
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Drop the gradients of every optimizer."""
        for item in self:
            item.zero_grad(*args, **kwargs)


class OptimizerList(SteppingList):
    """Optimizers, of which there must be one by the time they step."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step every optimizer in order; answer what the last one answered.

        Raises:
            RuntimeError: If there is none.
        """
        if not self:
            raise RuntimeError(
                "state.optimizers=[] has nothing to step, so no weight would change. Set one before training, such as "
                "state.optimizers = torch.optim.SGD(state.model.parameters(), lr=0.1)."
            )
        return super().step(*args, **kwargs)


class KeptList(Generic[L]):
    """A descriptor for a list whose contents an assignment replaces, so that whoever holds the list sees it.

    One object, several, or `None` for no object may be assigned. The instance has to put its list into its `__dict__`
    under the attribute's name first.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> KeptList[L]: ...
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
        # Scripts that train one model after another free the last one by deleting every attribute of its state.
        del instance.__dict__[self._name]
