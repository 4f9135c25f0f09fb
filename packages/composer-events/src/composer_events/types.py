"""Names for what travels through a training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from composer_time import StringEnum

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler as PyTorchScheduler
    from torch.utils.data import Dataset

__all__ = [
    "JSON",
    "Batch",
    "BreakEpochException",
    "Dataset",
    "MemoryFormat",
    "PyTorchScheduler",
    "TrainerMode",
]

Batch: TypeAlias = Any
"""What a dataloader yields. Only the model and the `DataSpec` need to know what it is."""

JSON: TypeAlias = str | float | int | bool | Sequence["JSON"] | Mapping[str, "JSON"] | None
"""What `json.dumps` can write."""


class TrainerMode(StringEnum):
    """What the loop is doing."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "predict"


class MemoryFormat(StringEnum):
    """How a tensor's elements lie in memory, by the names of `torch.memory_format`."""

    CONTIGUOUS_FORMAT = "contiguous_format"
    CHANNELS_LAST = "channels_last"
    CHANNELS_LAST_3D = "channels_last_3d"
    PRESERVE_FORMAT = "preserve_format"


class BreakEpochException(Exception):  # the name that Composer's users type
    """Raise it in a training loop's hook to end the epoch there, without `Event.EPOCH_END`."""


def __getattr__(name: str) -> object:
    # torch is imported for the two names that are torch's own, and for nothing else.
    if name == "Dataset":
        from torch.utils.data import Dataset as value
    elif name == "PyTorchScheduler":
        from torch.optim.lr_scheduler import LRScheduler as value
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value
