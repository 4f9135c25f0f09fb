"""Names for what travels through a training loop."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_events.types import JSON as JSON
    from composer_events.types import Batch as Batch
    from composer_events.types import BreakEpochException as BreakEpochException
    from composer_events.types import Dataset as Dataset
    from composer_events.types import MemoryFormat as MemoryFormat
    from composer_events.types import PyTorchScheduler as PyTorchScheduler
    from composer_events.types import TrainerMode as TrainerMode

__all__ = ["Batch", "JSON", "Dataset", "MemoryFormat", "TrainerMode", "PyTorchScheduler", "BreakEpochException"]

# Lazy because two of them are torch's own.
__getattr__, __dir__ = lazy_face(__name__, {"composer_events.types": __all__})
