"""Saving, moving and restoring of training state.

- `saver`, `loader`, `resume`: save a training `State` at intervals, load it, and find the checkpoint to resume from.
  `state`, `ignore_keys` and `data_position` are parts of these.
- `files`: single files, `.pt`, `.safetensors` or compressed, safe to open and verified. `inspection`: their contents.
- `verify`: check a file or a folder against what was written.
- `sharded`: folders that several ranks write together. `async_save`: saves in the background of training.
- `commit`, `lock`: atomic writes of files and folders, and exclusive use of a save folder.
- `save_folder`, `retention`, `names`: the newest checkpoint, checkpoints to delete, file names.
- `stores`, `remote`: object stores, uploads and downloads.
- `tensors`: checkpoints of any format, read and written tensor by tensor.
- `modular`: a model and an optimizer saved separately. `bridges`: checkpoints of other trainers.
- `manifest`, `file_io`, `pickles`, `errors`: foundations of the other modules.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# Imported eagerly: the submodule has its function's name, so any later import of it would replace the function here.
from composer_checkpoint.verify import verify

if TYPE_CHECKING:
    from composer_checkpoint._pickle_inspection import safe_unpickle
    from composer_checkpoint.async_save import AsyncSaver
    from composer_checkpoint.commit import read_pointer, remove_leftovers, replace_pointer, write_atomically
    from composer_checkpoint.data_position import DataPosition
    from composer_checkpoint.errors import (
        CheckpointConflictError,
        CheckpointError,
        CorruptCheckpointError,
        IncompatibleCheckpointError,
        NewerCheckpointError,
        NoCheckpointError,
        StorageError,
        UnfittingOptimizerError,
        UnfittingWeightsError,
        UnsafeCheckpointError,
    )
    from composer_checkpoint.file_io import HASH_NAME, hash_bytes, hash_file, hash_tensor, hash_tensors
    from composer_checkpoint.files import load_file, read_manifest, safe_torch_load, save_file, verify_file
    from composer_checkpoint.formats.archives import KNOWN_COMPRESSORS, CompressorNotFound, check_compressor
    from composer_checkpoint.ignore_keys import glob_filter
    from composer_checkpoint.inspection import FileDescription, TensorDescription, inspect_file
    from composer_checkpoint.loader import LoadCheckpoint, load_checkpoint
    from composer_checkpoint.lock import FolderInUseError, FolderLock
    from composer_checkpoint.manifest import FORMAT_VERSION, MANIFEST_NAME, FileEntry, Manifest, TensorEntry
    from composer_checkpoint.names import PartialFilePath, check_filename
    from composer_checkpoint.remote.upload import RemoteUploader
    from composer_checkpoint.resume import checkpoint_to_resume
    from composer_checkpoint.retention import RetentionPolicy, SavedCheckpoint, choose_to_delete
    from composer_checkpoint.save_folder import (
        Found,
        Skipped,
        ensure_folder_has_no_conflicting_files,
        ensure_folder_is_empty,
        find_conflicts,
        find_newest,
    )
    from composer_checkpoint.saver import CheckpointSaver
    from composer_checkpoint.sharded import load_sharded, save_sharded, verify_folder
    from composer_checkpoint.state import save_checkpoint

_NAMES = {
    "_pickle_inspection": "safe_unpickle",
    "async_save": "AsyncSaver",
    "commit": "read_pointer remove_leftovers replace_pointer write_atomically",
    "data_position": "DataPosition",
    "errors": (
        "CheckpointConflictError CheckpointError CorruptCheckpointError IncompatibleCheckpointError "
        "NewerCheckpointError NoCheckpointError StorageError UnfittingOptimizerError UnfittingWeightsError "
        "UnsafeCheckpointError"
    ),
    "file_io": "HASH_NAME hash_bytes hash_file hash_tensor hash_tensors",
    "files": "load_file read_manifest safe_torch_load save_file verify_file",
    "formats.archives": "KNOWN_COMPRESSORS CompressorNotFound check_compressor",
    "ignore_keys": "glob_filter",
    "inspection": "FileDescription TensorDescription inspect_file",
    "loader": "LoadCheckpoint load_checkpoint",
    "lock": "FolderInUseError FolderLock",
    "manifest": "FORMAT_VERSION MANIFEST_NAME FileEntry Manifest TensorEntry",
    "names": "PartialFilePath check_filename",
    "remote.upload": "RemoteUploader",
    "resume": "checkpoint_to_resume",
    "retention": "RetentionPolicy SavedCheckpoint choose_to_delete",
    "save_folder": (
        "Found Skipped ensure_folder_has_no_conflicting_files ensure_folder_is_empty find_conflicts find_newest"
    ),
    "saver": "CheckpointSaver",
    "sharded": "load_sharded save_sharded verify_folder",
    "state": "save_checkpoint",
}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = [
    "save_file",
    "load_file",
    "read_manifest",
    "verify_file",
    "safe_torch_load",
    "verify",
    "FileDescription",
    "TensorDescription",
    "inspect_file",
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "FileEntry",
    "Manifest",
    "TensorEntry",
    "HASH_NAME",
    "hash_bytes",
    "hash_file",
    "hash_tensor",
    "hash_tensors",
    "safe_unpickle",
    "KNOWN_COMPRESSORS",
    "CompressorNotFound",
    "check_compressor",
    "CheckpointError",
    "CorruptCheckpointError",
    "UnsafeCheckpointError",
    "IncompatibleCheckpointError",
    "NewerCheckpointError",
    "UnfittingOptimizerError",
    "UnfittingWeightsError",
    "StorageError",
    "NoCheckpointError",
    "CheckpointConflictError",
    "write_atomically",
    "replace_pointer",
    "remove_leftovers",
    "read_pointer",
    "Found",
    "Skipped",
    "find_newest",
    "RetentionPolicy",
    "SavedCheckpoint",
    "choose_to_delete",
    "ensure_folder_has_no_conflicting_files",
    "ensure_folder_is_empty",
    "find_conflicts",
    "FolderInUseError",
    "FolderLock",
    "PartialFilePath",
    "check_filename",
    "RemoteUploader",
    "save_sharded",
    "load_sharded",
    "verify_folder",
    "AsyncSaver",
    "CheckpointSaver",
    "LoadCheckpoint",
    "save_checkpoint",
    "load_checkpoint",
    "checkpoint_to_resume",
    "DataPosition",
    "glob_filter",
    "__version__",
]

__version__: str


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # imported late, since it takes longer than the rest of this file

        value: object = version("composer-checkpoint")
    elif name in _HOME:
        value = getattr(import_module(f"composer_checkpoint.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Stored, so that the next access does not come here.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
