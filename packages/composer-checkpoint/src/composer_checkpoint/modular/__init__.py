"""Saving and loading of a model, an optimizer and the rest of a run, each on its own.

- `state_dict`: collects state dicts. `save`: writes them to a folder. `load`: reads them, with any sharding.
- `state_dict_types`: such dicts of Composer's `state_dict_type`s, and loading of them.
- `checkpoint_folder`: one folder for several parts, which appears whole or not at all.
- `options`: settings of `save_checkpoint_to_disk` and `load_checkpoint`.
- `download_monolithic_checkpoint` and `upload_file` of `composer_checkpoint.remote.fetch`: downloads and uploads.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_checkpoint.modular.load import load_checkpoint as load_checkpoint
    from composer_checkpoint.modular.load import load_model_checkpoint as load_model_checkpoint
    from composer_checkpoint.modular.load import load_optim_checkpoint as load_optim_checkpoint
    from composer_checkpoint.modular.load import load_resumption_checkpoint as load_resumption_checkpoint
    from composer_checkpoint.modular.options import CheckpointLoadOptions as CheckpointLoadOptions
    from composer_checkpoint.modular.options import CheckpointSaveOptions as CheckpointSaveOptions
    from composer_checkpoint.modular.save import checkpoint_folder as checkpoint_folder
    from composer_checkpoint.modular.save import save_checkpoint_to_disk as save_checkpoint_to_disk
    from composer_checkpoint.modular.save import save_composer_metadata_to_disk as save_composer_metadata_to_disk
    from composer_checkpoint.modular.save import save_model_to_disk as save_model_to_disk
    from composer_checkpoint.modular.save import save_optim_to_disk as save_optim_to_disk
    from composer_checkpoint.modular.save import save_resumption_state_to_disk as save_resumption_state_to_disk
    from composer_checkpoint.modular.save import save_state_dict_to_disk as save_state_dict_to_disk
    from composer_checkpoint.modular.state_dict import get_metadata_state_dict as get_metadata_state_dict
    from composer_checkpoint.modular.state_dict import get_model_state_dict as get_model_state_dict
    from composer_checkpoint.modular.state_dict import get_optim_state_dict as get_optim_state_dict
    from composer_checkpoint.modular.state_dict import get_resumption_state_dict as get_resumption_state_dict
    from composer_checkpoint.modular.state_dict_types import fsdp_get_optim_state_dict as fsdp_get_optim_state_dict
    from composer_checkpoint.modular.state_dict_types import (
        fsdp_state_dict_type_context as fsdp_state_dict_type_context,
    )
    from composer_checkpoint.modular.state_dict_types import (
        get_fsdp_full_optim_state_dict as get_fsdp_full_optim_state_dict,
    )
    from composer_checkpoint.modular.state_dict_types import (
        get_fsdp_sharded_optim_state_dict as get_fsdp_sharded_optim_state_dict,
    )
    from composer_checkpoint.remote.fetch import download_monolithic_checkpoint as download_monolithic_checkpoint
    from composer_checkpoint.remote.fetch import upload_file as upload_file

# Home of each public name, imported on first use to keep the package cheap to import.
_HOME = {
    "checkpoint_folder": "composer_checkpoint.modular.save",
    "get_model_state_dict": "composer_checkpoint.modular.state_dict",
    "get_optim_state_dict": "composer_checkpoint.modular.state_dict",
    "get_metadata_state_dict": "composer_checkpoint.modular.state_dict",
    "get_resumption_state_dict": "composer_checkpoint.modular.state_dict",
    "fsdp_get_optim_state_dict": "composer_checkpoint.modular.state_dict_types",
    "fsdp_state_dict_type_context": "composer_checkpoint.modular.state_dict_types",
    "get_fsdp_full_optim_state_dict": "composer_checkpoint.modular.state_dict_types",
    "get_fsdp_sharded_optim_state_dict": "composer_checkpoint.modular.state_dict_types",
    "CheckpointSaveOptions": "composer_checkpoint.modular.options",
    "save_checkpoint_to_disk": "composer_checkpoint.modular.save",
    "save_model_to_disk": "composer_checkpoint.modular.save",
    "save_optim_to_disk": "composer_checkpoint.modular.save",
    "save_resumption_state_to_disk": "composer_checkpoint.modular.save",
    "save_composer_metadata_to_disk": "composer_checkpoint.modular.save",
    "save_state_dict_to_disk": "composer_checkpoint.modular.save",
    "CheckpointLoadOptions": "composer_checkpoint.modular.options",
    "load_checkpoint": "composer_checkpoint.modular.load",
    "load_model_checkpoint": "composer_checkpoint.modular.load",
    "load_optim_checkpoint": "composer_checkpoint.modular.load",
    "load_resumption_checkpoint": "composer_checkpoint.modular.load",
    "download_monolithic_checkpoint": "composer_checkpoint.remote.fetch",
    "upload_file": "composer_checkpoint.remote.fetch",
}
__all__ = [
    "checkpoint_folder",
    "get_model_state_dict",
    "get_optim_state_dict",
    "get_metadata_state_dict",
    "get_resumption_state_dict",
    "fsdp_get_optim_state_dict",
    "fsdp_state_dict_type_context",
    "get_fsdp_full_optim_state_dict",
    "get_fsdp_sharded_optim_state_dict",
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


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Cached in the module, so that the next access does not come here.
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
