"""Saving and loading a model, an optimizer and what else a run needs, each by itself, without a Trainer."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_checkpoint.modular import CheckpointLoadOptions as CheckpointLoadOptions
    from composer_checkpoint.modular import CheckpointSaveOptions as CheckpointSaveOptions
    from composer_checkpoint.modular import download_monolithic_checkpoint as download_monolithic_checkpoint
    from composer_checkpoint.modular import get_metadata_state_dict as get_metadata_state_dict
    from composer_checkpoint.modular import get_model_state_dict as get_model_state_dict
    from composer_checkpoint.modular import get_optim_state_dict as get_optim_state_dict
    from composer_checkpoint.modular import get_resumption_state_dict as get_resumption_state_dict
    from composer_checkpoint.modular import load_checkpoint as load_checkpoint
    from composer_checkpoint.modular import load_model_checkpoint as load_model_checkpoint
    from composer_checkpoint.modular import load_optim_checkpoint as load_optim_checkpoint
    from composer_checkpoint.modular import load_resumption_checkpoint as load_resumption_checkpoint
    from composer_checkpoint.modular import save_checkpoint_to_disk as save_checkpoint_to_disk
    from composer_checkpoint.modular import save_composer_metadata_to_disk as save_composer_metadata_to_disk
    from composer_checkpoint.modular import save_model_to_disk as save_model_to_disk
    from composer_checkpoint.modular import save_optim_to_disk as save_optim_to_disk
    from composer_checkpoint.modular import save_resumption_state_to_disk as save_resumption_state_to_disk
    from composer_checkpoint.modular import save_state_dict_to_disk as save_state_dict_to_disk
    from composer_checkpoint.modular import upload_file as upload_file

__all__ = [
    "get_model_state_dict",
    "get_optim_state_dict",
    "get_metadata_state_dict",
    "get_resumption_state_dict",
    "CheckpointSaveOptions",
    "save_checkpoint_to_disk",
    "save_model_to_disk",
    "save_optim_to_disk",
    "save_resumption_state_to_disk",
    "save_composer_metadata_to_disk",
    "save_state_dict_to_disk",
    "CheckpointLoadOptions",
    "load_checkpoint",
    "load_model_checkpoint",
    "load_optim_checkpoint",
    "load_resumption_checkpoint",
    "download_monolithic_checkpoint",
    "upload_file",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {"composer_checkpoint.modular": __all__},
    submodules=["download", "load", "save", "state_dict", "upload"],
)
