"""What happens in training, when, and who may act on it."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_dist.devices import Precision as Precision
    from composer_dist.devices import get_precision_context as get_precision_context
    from composer_events.algorithm import Algorithm as Algorithm
    from composer_events.callback import Callback as Callback
    from composer_events.data_spec import DataSpec as DataSpec
    from composer_events.data_spec import ensure_data_spec as ensure_data_spec
    from composer_events.engine import Engine as Engine
    from composer_events.engine import Trace as Trace
    from composer_events.evaluator import Evaluator as Evaluator
    from composer_events.evaluator import ensure_evaluator as ensure_evaluator
    from composer_events.evaluator import validate_eval_automicrobatching as validate_eval_automicrobatching
    from composer_events.event import Event as Event
    from composer_events.intervals import evaluate_periodically as evaluate_periodically
    from composer_events.passes import AlgorithmPass as AlgorithmPass
    from composer_events.serializable import Serializable as Serializable
    from composer_events.state import State as State
    from composer_events.types import JSON as JSON
    from composer_events.types import Batch as Batch
    from composer_events.types import BreakEpochException as BreakEpochException
    from composer_events.types import Dataset as Dataset
    from composer_events.types import MemoryFormat as MemoryFormat
    from composer_events.types import PyTorchScheduler as PyTorchScheduler
    from composer_events.types import TrainerMode as TrainerMode
    from composer_time import Time as Time
    from composer_time import Timestamp as Timestamp
    from composer_time import TimeUnit as TimeUnit
    from composer_time import ensure_time as ensure_time

__all__ = [
    "Time",
    "Timestamp",
    "TimeUnit",
    "ensure_time",
    "Event",
    "Engine",
    "Trace",
    "AlgorithmPass",
    "Algorithm",
    "Callback",
    "State",
    "DataSpec",
    "ensure_data_spec",
    "Evaluator",
    "ensure_evaluator",
    "evaluate_periodically",
    "validate_eval_automicrobatching",
    "Precision",
    "get_precision_context",
    "Serializable",
    "Batch",
    "JSON",
    "Dataset",
    "MemoryFormat",
    "TrainerMode",
    "PyTorchScheduler",
    "BreakEpochException",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer_time": ["Time", "Timestamp", "TimeUnit", "ensure_time"],
        "composer_events.event": ["Event"],
        "composer_events.engine": ["Engine", "Trace"],
        "composer_events.passes": ["AlgorithmPass"],
        "composer_events.algorithm": ["Algorithm"],
        "composer_events.callback": ["Callback"],
        "composer_events.state": ["State"],
        "composer_events.data_spec": ["DataSpec", "ensure_data_spec"],
        "composer_events.evaluator": ["Evaluator", "ensure_evaluator", "validate_eval_automicrobatching"],
        "composer_events.intervals": ["evaluate_periodically"],
        "composer_dist.devices": ["Precision", "get_precision_context"],
        "composer_events.serializable": ["Serializable"],
        "composer_events.types": [
            "Batch",
            "JSON",
            "Dataset",
            "MemoryFormat",
            "TrainerMode",
            "PyTorchScheduler",
            "BreakEpochException",
        ],
    },
    submodules=[
        "algorithm",
        "callback",
        "data_spec",
        "engine",
        "evaluator",
        "event",
        "passes",
        "precision",
        "serializable",
        "state",
        "time",
        "types",
    ],
)
