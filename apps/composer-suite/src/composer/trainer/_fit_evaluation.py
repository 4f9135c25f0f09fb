"""Which evaluators are due during `fit`."""

from collections.abc import Callable

from composer.trainer._clock import Clock
from composer.trainer._evaluation import Evaluation
from composer.trainer._evaluation_data import EvaluationBatches
from composer_events.engine import Engine
from composer_events.evaluator import Evaluator
from composer_events.event import Event
from composer_events.state import State


class FitEvaluation:
    """Runs the evaluators that are due on an event of `fit`, with the clock of training stopped."""

    def __init__(
        self, state: State, engine: Engine, evaluation: Evaluation, clock: Clock, take_evaluators: Callable[[], None]
    ) -> None:
        self._state = state
        self._engine = engine
        self._evaluation = evaluation
        self._clock = clock
        self._data = EvaluationBatches(state)
        self._take_evaluators = take_evaluators
        self._version: int | None = None  # of the list of evaluators, when they were made ready

    def __call__(self, event: Event) -> None:
        """Evaluate on BATCH_END, EPOCH_END or FIT_END whatever has its turn."""
        state = self._state
        if not state.evaluators:
            return
        if state.evaluators.version != self._version:
            self._take_evaluators()
            self._version = state.evaluators.version
        due = [evaluator for evaluator in state.evaluators if _is_due(evaluator, state, event)]
        if not due:
            return
        with self._clock.paused():
            self._engine.run_event(Event.EVAL_BEFORE_ALL)
            for evaluator in due:
                subset = evaluator.subset_num_batches
                metrics = state.eval_metrics[evaluator.label]
                self._evaluation.run(evaluator, metrics, -1 if subset is None else subset, self._data.open)
            self._engine.run_event(Event.EVAL_AFTER_ALL)


def _is_due(evaluator: Evaluator, state: State, event: Event) -> bool:
    return evaluator.eval_interval is not None and evaluator.eval_interval(state, event)
