"""An evaluation that no training asked for: `Trainer.eval`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composer.trainer._evaluators import make_evaluators, warn_of_known_labels
from composer_events.event import Event

if TYPE_CHECKING:
    from composer.trainer._workings import Workings
    from composer_events.evaluator import Evaluator

__all__ = ["evaluate_alone"]


def evaluate_alone(workings: Workings, eval_dataloader: Any, subset_num_batches: int) -> None:
    """Evaluate on a dataloader, or with all evaluators there are.

    Raises:
        ValueError: If there is nothing to evaluate on.
    """
    state = workings.state
    workings.take_evaluators()
    evaluators: list[Evaluator] = list(state.evaluators)
    if eval_dataloader is not None:
        evaluators = make_evaluators(eval_dataloader, workings.model, 1, subset_num_batches, state.device)
        warn_of_known_labels(evaluators, state.evaluators)
        workings.add_metrics(evaluators)
    if not evaluators:
        raise ValueError("eval_dataloader must be provided to either Trainer init() or eval().")
    workings.engine.run_event(Event.EVAL_STANDALONE_START)
    state.evaluators = [*state.evaluators, *(e for e in evaluators if e not in state.evaluators)]
    try:
        evaluation = workings.make_evaluation()
        for evaluator in evaluators:
            subset = evaluator.subset_num_batches if subset_num_batches == -1 else subset_num_batches
            evaluation.run(evaluator, state.eval_metrics[evaluator.label], -1 if subset is None else subset)
    finally:
        if eval_dataloader is not None:
            state.evaluators = [e for e in state.evaluators if e not in evaluators]
    workings.engine.run_event(Event.EVAL_STANDALONE_END)
