"""What to evaluate on, with which metrics and how often."""

from composer_events.evaluator import Evaluator, ensure_evaluator, validate_eval_automicrobatching
from composer_events.intervals import evaluate_periodically

__all__ = ["Evaluator", "ensure_evaluator", "evaluate_periodically", "validate_eval_automicrobatching"]
