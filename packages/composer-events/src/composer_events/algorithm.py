"""What an algorithm is: something that may change training at the events it matches."""

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
    """Change training at chosen events by changing the `State`.

    At each event the engine asks every algorithm's `match` once, puts those that answered yes in order, and then
    calls `apply` on one after another. The class attributes below tell the engine's default passes what the algorithm
    needs of that order; where none is set, algorithms run as the user listed them, and in reverse on events whose name
    begins with `AFTER_`.

    Attributes:
        surgery_rank: Place on `Event.INIT` among the algorithms that run neither first nor last; lower acts earlier
            and wins over `runs_before` and `runs_after`. Algorithms that replace operators have 1 or 2, those that
            wrap modules 3 or 4, those that convert what is there by then 5 or 6, those that refer to the finished
            model 7. By default 4.
        runs_first: Act before the others, whatever the event, on `Event.INIT` whatever the ranks.
        runs_last: Act after the others, whatever the event, on `Event.INIT` whatever the ranks.
        runs_before: Class names of algorithms that must act after this one where both act, and before it on events
            whose name begins with `AFTER_`, where work is undone. Subclasses of those classes are meant too. On
            `Event.INIT` this decides only among algorithms of one `surgery_rank`.
        runs_after: The same, seen from the other side.
        acts_on: The events on which `match` may ever answer yes, for `Engine.explain`, which asks `match` where this is
            `None`. Nothing else depends on it. A subclass with another `match` has to declare it anew.
        conflicts_with: Class names of algorithms that do not go with this one, each with the reason, a sentence. They
            are reported, not refused.

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
        del args, kwargs  # a subclass may pass on whatever it was given

    @property
    def find_unused_parameters(self) -> bool:
        """Answer whether some parameters may get no gradient, which DistributedDataParallel has to be told."""
        return False

    @property
    def backwards_create_graph(self) -> bool:
        """Answer whether gradients of gradients are needed, so that backward has to build a graph."""
        return False

    @staticmethod
    def required_on_load() -> bool:
        """Answer whether the algorithm changes the model so that its checkpoints load only where it was applied.

        Such an algorithm needs a `repr` that names its arguments, because that is what the checkpoint keeps of it.
        """
        return False

    @abstractmethod
    def match(self, event: Event, state: State) -> bool:
        """Answer whether to act on this event. Called exactly once for each event, before any algorithm acts.

        Args:
            event: The event.
            state: The training state, not to be changed here.
        """

    @abstractmethod
    def apply(self, event: Event, state: State, logger: Logger) -> int | None:
        """Act, by changing `state` in place.

        Args:
            event: The event that was matched.
            state: The training state.
            logger: Takes what is worth keeping.

        Returns:
            Anything; it becomes the `exit_code` of the event's `Trace`.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: how the algorithm was made."""
        return {"repr": repr(self)}
