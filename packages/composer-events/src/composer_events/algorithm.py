"""Base class of algorithms, which change training at the events that they match."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from composer_events.serializable import Serializable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from composer_events.event import Event
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["Algorithm"]


class Algorithm(Serializable, ABC):
    """Base class of algorithms, which change training at chosen events by changing the `State`.

    At each event the engine calls every algorithm's `match` once, orders those that matched, and then calls `apply` of
    each. The class attributes below tell the engine's default passes how to order the algorithm; where none is set,
    algorithms run as the user listed them, and in reverse on events whose name begins with `AFTER_`.

    Attributes:
        surgery_rank: Position on `Event.INIT` among the algorithms that run neither first nor last. Lower acts earlier
            and takes precedence over `runs_before` and `runs_after`. Algorithms that replace operators have 1 or 2,
            those that wrap modules 3 or 4, those that convert the modules present by then 5 or 6, those that refer to
            the finished model 7. Default 4.
        runs_first: Act before the others on every event, on `Event.INIT` regardless of the ranks.
        runs_last: Act after the others on every event, on `Event.INIT` regardless of the ranks.
        runs_before: Class names of algorithms that must act after this one where both act, and before it on events
            whose name begins with `AFTER_`, where work is undone. Their subclasses are included. On `Event.INIT` this
            decides only among algorithms with the same `surgery_rank`.
        runs_after: The reverse of `runs_before`.
        acts_on: The events on which `match` may return true, used only by `Engine.explain`, which calls `match` where
            this is `None`. A subclass that overrides `match` has to declare it again.
        conflicts_with: Class names of algorithms that are incompatible with this one, each with the reason as a
            sentence. Conflicts are reported, not rejected.

    Example:
        >>> class CountBatches(Algorithm):
        ...     seen = 0
        ...     def match(self, event, state):
        ...         return event.value == "batch_start"
        ...     def apply(self, event, state, logger):
        ...         self.seen += 1
    """

    surgery_rank: ClassVar[int] = 4
    runs_first: ClassVar[bool] = False
    runs_last: ClassVar[bool] = False
    runs_before: ClassVar[frozenset[str]] = frozenset()
    runs_after: ClassVar[frozenset[str]] = frozenset()
    conflicts_with: ClassVar[Mapping[str, str]] = MappingProxyType({})
    acts_on: Collection[Event] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs  # accepted, because a subclass may pass on any arguments

    @property
    def find_unused_parameters(self) -> bool:
        """Return whether some parameters may get no gradient, a setting of `DistributedDataParallel`."""
        return False

    @property
    def backwards_create_graph(self) -> bool:
        """Return whether gradients of gradients are needed, so that backward must build a graph."""
        return False

    @staticmethod
    def required_on_load() -> bool:
        """Return whether the algorithm changes the model, so that checkpoints load only after it was applied.

        Such an algorithm needs a `repr` that lists its arguments, because checkpoints store the `repr`.
        """
        return False

    @abstractmethod
    def match(self, event: Event, state: State) -> bool:
        """Return whether to act on this event. Called exactly once per event, before any algorithm acts.

        Args:
            event: The event.
            state: The training state, which must not be changed here.
        """

    @abstractmethod
    def apply(self, event: Event, state: State, logger: Logger) -> int | None:
        """Act on the event by changing `state` in place.

        Args:
            event: The matched event.
            state: The training state.
            logger: Logs metrics and other results.

        Returns:
            Any value; it is stored as the `exit_code` of the event's `Trace`.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the `repr`, from which the algorithm can be rebuilt."""
        return {"repr": repr(self)}
