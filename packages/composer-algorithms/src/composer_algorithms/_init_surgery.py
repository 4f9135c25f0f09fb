"""What algorithms have in common that rebuild the model before training begins."""

from typing import TYPE_CHECKING

from composer_events.algorithm import Algorithm
from composer_events.event import Event

if TYPE_CHECKING:
    from composer_events.state import State


class InitSurgery(Algorithm):
    """Base of an algorithm that acts on INIT, and without which a checkpoint's weights do not fit the model."""

    acts_on = frozenset({Event.INIT})

    @staticmethod
    def required_on_load() -> bool:
        """Answer yes: a checkpoint loads only into a model that was changed in the same way."""
        return True

    def match(self, event: Event, state: "State") -> bool:
        """Answer whether the event is INIT."""
        return event == Event.INIT
