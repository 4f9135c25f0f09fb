"""Types and enumerations shared by the training loop, algorithms and callbacks."""

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
"""A batch as the dataloader yields it. Only the model and the `DataSpec` depend on its type."""

JSON: TypeAlias = str | float | int | bool | Sequence["JSON"] | Mapping[str, "JSON"] | None
"""A value that `json.dumps` can write."""


class TrainerMode(StringEnum):
    """Mode of the training loop."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "predict"


class MemoryFormat(StringEnum):
    """Memory format of tensors, by the names of `torch.memory_format`."""

    CONTIGUOUS_FORMAT = "contiguous_format"
    CHANNELS_LAST = "channels_last"
    CHANNELS_LAST_3D = "channels_last_3d"
    PRESERVE_FORMAT = "preserve_format"


class BreakEpochException(Exception):  # the name is public in Composer
    """Exception that ends the current epoch when a hook of the training loop raises it, without `Event.EPOCH_END`."""


def __getattr__(name: str) -> object:
    # Lazily, so that importing this module does not import torch.
    if name == "Dataset":
        from torch.utils.data import Dataset as value
    elif name == "PyTorchScheduler":
        from torch.optim.lr_scheduler import LRScheduler as value
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value
