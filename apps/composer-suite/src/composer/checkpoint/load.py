"""Loading a model, an optimizer and what else a run needs, each from files of its own."""

from composer_checkpoint.modular.load import (
    load_checkpoint,
    load_model_checkpoint,
    load_optim_checkpoint,
    load_resumption_checkpoint,
)
from composer_checkpoint.modular.options import CheckpointLoadOptions

__all__ = [
    "CheckpointLoadOptions",
    "load_checkpoint",
    "load_model_checkpoint",
    "load_optim_checkpoint",
    "load_resumption_checkpoint",
]
