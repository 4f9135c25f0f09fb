"""Events of a training loop, and the algorithms, callbacks and loggers that act on them.

A training loop passes each `Event` to an `Engine`, which runs the matching `Algorithm`s and the listening `Callback`s;
all of them share one `State`. `DataSpec` and `Evaluator` describe data to the loop, `Logger` and `LoggerDestination`
handle logged values. Names are imported on first use, and none of them imports torch.

`composer_events.data_position` resumes a run at its next batch, and `seeded_batches` makes batches reproducible. These
two modules need torch, which the extra `torch` installs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_events.algorithm import Algorithm as Algorithm
    from composer_events.batches import IteratorFileStream as IteratorFileStream
    from composer_events.batches import batch_get as batch_get
    from composer_events.batches import batch_set as batch_set
    from composer_events.batches import ensure_tuple as ensure_tuple
    from composer_events.batches import iterate_with_callback as iterate_with_callback
    from composer_events.batches import map_collection as map_collection
    from composer_events.callback import Callback as Callback
    from composer_events.data_spec import DataSpec as DataSpec
    from composer_events.data_spec import default_split_batch as default_split_batch
    from composer_events.data_spec import ensure_data_spec as ensure_data_spec
    from composer_events.engine import Engine as Engine
    from composer_events.engine import Trace as Trace
    from composer_events.engine import Traces as Traces
    from composer_events.evaluator import Evaluator as Evaluator
    from composer_events.evaluator import ensure_evaluator as ensure_evaluator
    from composer_events.event import Event as Event
    from composer_events.event import ProfilerAction as ProfilerAction
    from composer_events.explanation import Explanation as Explanation
    from composer_events.explanation import Turn as Turn
    from composer_events.formatting import format_name_with_dist as format_name_with_dist
    from composer_events.formatting import format_name_with_dist_and_time as format_name_with_dist_and_time
    from composer_events.formatting import partial_format as partial_format
    from composer_events.hparams import convert_flat_dict_to_nested_dict as convert_flat_dict_to_nested_dict
    from composer_events.hparams import convert_nested_dict_to_flat_dict as convert_nested_dict_to_flat_dict
    from composer_events.hparams import extract_hparams as extract_hparams
    from composer_events.intervals import create_interval_scheduler as create_interval_scheduler
    from composer_events.intervals import evaluate_periodically as evaluate_periodically
    from composer_events.logger import Logger as Logger
    from composer_events.logger import log_lazily as log_lazily
    from composer_events.logger_destination import BufferedDestination as BufferedDestination
    from composer_events.logger_destination import LoggedMetrics as LoggedMetrics
    from composer_events.logger_destination import LoggerDestination as LoggerDestination
    from composer_events.logger_destination import format_log_data_value as format_log_data_value
    from composer_events.parallelism import ParallelismType as ParallelismType
    from composer_events.passes import AlgorithmPass as AlgorithmPass
    from composer_events.serializable import Serializable as Serializable
    from composer_events.state import State as State
    from composer_events.types import JSON as JSON
    from composer_events.types import Batch as Batch
    from composer_events.types import BreakEpochException as BreakEpochException
    from composer_events.types import MemoryFormat as MemoryFormat
    from composer_events.types import TrainerMode as TrainerMode
    from composer_events.warnings import NoEffectWarning as NoEffectWarning
    from composer_events.warnings import NotIntendedUseWarning as NotIntendedUseWarning
    from composer_events.warnings import VersionedDeprecationWarning as VersionedDeprecationWarning

_MODULES = {
    "event": ("Event", "ProfilerAction"),
    "engine": ("Engine", "Trace", "Traces"),
    "explanation": ("Explanation", "Turn"),
    "passes": ("AlgorithmPass",),
    "algorithm": ("Algorithm",),
    "callback": ("Callback",),
    "serializable": ("Serializable",),
    "state": ("State",),
    "parallelism": ("ParallelismType",),
    "data_spec": ("DataSpec", "default_split_batch", "ensure_data_spec"),
    "evaluator": ("Evaluator", "ensure_evaluator"),
    "intervals": ("create_interval_scheduler", "evaluate_periodically"),
    "logger": ("Logger", "log_lazily"),
    "logger_destination": ("LoggerDestination", "BufferedDestination", "LoggedMetrics", "format_log_data_value"),
    "formatting": ("format_name_with_dist", "format_name_with_dist_and_time", "partial_format"),
    "hparams": ("extract_hparams", "convert_nested_dict_to_flat_dict", "convert_flat_dict_to_nested_dict"),
    "batches": (
        "batch_get",
        "batch_set",
        "IteratorFileStream",
        "ensure_tuple",
        "iterate_with_callback",
        "map_collection",
    ),
    "types": ("Batch", "BreakEpochException", "JSON", "MemoryFormat", "TrainerMode"),
    "warnings": ("NoEffectWarning", "NotIntendedUseWarning", "VersionedDeprecationWarning"),
}
_HOME = {name: f"composer_events.{module}" for module, names in _MODULES.items() for name in names}

__all__ = [*_HOME, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]  # declared in the block above

__version__: str


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # reading the metadata costs more than importing all of the above

        value = version("composer-events")
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
