"""Save and load a model, an optimizer and the rest of a run separately.

- `state_dict`: collects state dicts. `save`: writes them to a folder. `load`: reads them, with any sharding.
- `state_dict_types`: collects and loads state dicts of Composer's `state_dict_type`s.
- `checkpoint_folder`: writes several parts to one folder atomically.
- `options`: settings of `save_checkpoint_to_disk` and `load_checkpoint`.
- `download_monolithic_checkpoint` and `upload_file` of `composer_checkpoint.remote.fetch`: downloads and uploads.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_checkpoint.modular.load import (
        load_checkpoint,
        load_model_checkpoint,
        load_optim_checkpoint,
        load_resumption_checkpoint,
    )
    from composer_checkpoint.modular.options import CheckpointLoadOptions, CheckpointSaveOptions
    from composer_checkpoint.modular.save import (
        checkpoint_folder,
        save_checkpoint_to_disk,
        save_composer_metadata_to_disk,
        save_model_to_disk,
        save_optim_to_disk,
        save_resumption_state_to_disk,
        save_state_dict_to_disk,
    )
    from composer_checkpoint.modular.state_dict import (
        get_metadata_state_dict,
        get_model_state_dict,
        get_optim_state_dict,
        get_resumption_state_dict,
    )
    from composer_checkpoint.modular.state_dict_types import (
        fsdp_get_optim_state_dict,
        fsdp_state_dict_type_context,
        get_fsdp_full_optim_state_dict,
        get_fsdp_sharded_optim_state_dict,
    )
    from composer_checkpoint.remote.fetch import download_monolithic_checkpoint, upload_file

# Home of each public name, imported on first use to keep the package cheap to import.
_NAMES = {
    "modular.load": "load_checkpoint load_model_checkpoint load_optim_checkpoint load_resumption_checkpoint",
    "modular.options": "CheckpointLoadOptions CheckpointSaveOptions",
    "modular.save": (
        "checkpoint_folder save_checkpoint_to_disk save_composer_metadata_to_disk save_model_to_disk "
        "save_optim_to_disk save_resumption_state_to_disk save_state_dict_to_disk"
    ),
    "modular.state_dict": "get_metadata_state_dict get_model_state_dict get_optim_state_dict get_resumption_state_dict",
    "modular.state_dict_types": (
        "fsdp_get_optim_state_dict fsdp_state_dict_type_context get_fsdp_full_optim_state_dict "
        "get_fsdp_sharded_optim_state_dict"
    ),
    "remote.fetch": "download_monolithic_checkpoint upload_file",
}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}
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
    # Stored in the module, so that later accesses do not call this function.
    value = globals()[name] = getattr(import_module(f"composer_checkpoint.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
