"""Which of two sets of weights the model holds at each event: the one being trained or an average of it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from composer_events.event import Event

if TYPE_CHECKING:
    from composer_events.state import State

_CHECKPOINTS = frozenset({Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT})
_EVALUATIONS_BEGIN = frozenset({Event.EVAL_BEFORE_ALL, Event.EVAL_STANDALONE_START})
_EVALUATIONS_END = frozenset({Event.EVAL_AFTER_ALL, Event.EVAL_STANDALONE_END})
# BATCH_START alone would do for the forward pass. But others act on these events too, and what they find in the model
# must not depend on whether a checkpoint was saved just before.
_TRAINING = frozenset(
    {
        Event.ITERATION_START,
        Event.EPOCH_START,
        Event.BEFORE_DATALOADER,
        Event.BATCH_START,
        Event.BATCH_END,
        Event.EPOCH_END,
        Event.ITERATION_END,
        Event.FIT_END,
    }
)
# Events on which either set may have to give way to the other.
CHANGES_OF_WEIGHTS = frozenset(
    {*_CHECKPOINTS, *_EVALUATIONS_BEGIN, *_EVALUATIONS_END, *_TRAINING, Event.EVAL_START, Event.EVAL_END}
)


class ActiveWeights:
    """Keep account of which set the model holds, and exchange the sets when an event asks for the other one.

    Evaluation and checkpoints get the average, everything else the weights being trained. Between the events that
    enclose several evaluators the average stays in place, so that there are two exchanges however many they are.
    """

    def __init__(self) -> None:
        self.is_average = False
        self._among_evaluators = False

    def concerned_by(self, event: Event, state: "State") -> bool:
        """Answer whether `follow` has something to do at this event."""
        if event in _CHECKPOINTS and not _is_save_due(event, state):
            return False
        wanted = self._wanted(event)
        return wanted is not None and wanted != self.is_average

    def follow(self, event: Event, exchange: Callable[[], None]) -> None:
        """Call `exchange` if the event asks for the set of weights that the model does not hold."""
        wanted = self._wanted(event)
        if event in _EVALUATIONS_BEGIN:
            self._among_evaluators = True
        elif event in _EVALUATIONS_END or event in _TRAINING:  # an evaluation that broke off has no end
            self._among_evaluators = False
        if wanted is not None and wanted != self.is_average:
            exchange()
            self.is_average = wanted

    def _wanted(self, event: Event) -> bool | None:
        if event in _CHECKPOINTS or event in _EVALUATIONS_BEGIN or event == Event.EVAL_START:
            return True
        if event in _TRAINING or event in _EVALUATIONS_END:
            return False
        if event == Event.EVAL_END and not self._among_evaluators:
            return False
        return None


def _is_save_due(event: Event, state: "State") -> bool:
    # Whatever saves checkpoints is known by its interval, not by its class: the class lives on a floor above.
    for callback in state.callbacks:
        is_due: object = getattr(callback, "is_save_due", None) or getattr(callback, "save_interval", None)
        if callable(is_due) and is_due(state, event):
            return True
    return False
