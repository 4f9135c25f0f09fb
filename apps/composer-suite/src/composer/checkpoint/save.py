"""Saving a model, an optimizer, and what else a run needs, each to files of its own."""

from composer_checkpoint.modular.options import CheckpointSaveOptions
from composer_checkpoint.modular.save import (
    save_checkpoint_to_disk,
    save_composer_metadata_to_disk,
    save_model_to_disk,
    save_optim_to_disk,
    save_resumption_state_to_disk,
    save_state_dict_to_disk,
)

__all__ = [
    "CheckpointSaveOptions",
    "save_checkpoint_to_disk",
    "save_composer_metadata_to_disk",
    "save_model_to_disk",
    "save_optim_to_disk",
    "save_resumption_state_to_disk",
    "save_state_dict_to_disk",
]
