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
    from composer_checkpoint._pickle_inspection import safe_unpickle as safe_unpickle
    from composer_checkpoint.async_save import AsyncSaver as AsyncSaver
    from composer_checkpoint.commit import read_pointer as read_pointer
    from composer_checkpoint.commit import remove_leftovers as remove_leftovers
    from composer_checkpoint.commit import replace_pointer as replace_pointer
    from composer_checkpoint.commit import write_atomically as write_atomically
    from composer_checkpoint.data_position import DataPosition as DataPosition
    from composer_checkpoint.errors import CheckpointConflictError as CheckpointConflictError
    from composer_checkpoint.errors import CheckpointError as CheckpointError
    from composer_checkpoint.errors import CorruptCheckpointError as CorruptCheckpointError
    from composer_checkpoint.errors import IncompatibleCheckpointError as IncompatibleCheckpointError
    from composer_checkpoint.errors import NewerCheckpointError as NewerCheckpointError
    from composer_checkpoint.errors import NoCheckpointError as NoCheckpointError
    from composer_checkpoint.errors import StorageError as StorageError
    from composer_checkpoint.errors import UnfittingOptimizerError as UnfittingOptimizerError
    from composer_checkpoint.errors import UnfittingWeightsError as UnfittingWeightsError
    from composer_checkpoint.errors import UnsafeCheckpointError as UnsafeCheckpointError
    from composer_checkpoint.file_io import HASH_NAME as HASH_NAME
    from composer_checkpoint.file_io import hash_bytes as hash_bytes
    from composer_checkpoint.file_io import hash_file as hash_file
    from composer_checkpoint.file_io import hash_tensor as hash_tensor
    from composer_checkpoint.file_io import hash_tensors as hash_tensors
    from composer_checkpoint.files import load_file as load_file
    from composer_checkpoint.files import read_manifest as read_manifest
    from composer_checkpoint.files import safe_torch_load as safe_torch_load
    from composer_checkpoint.files import save_file as save_file
    from composer_checkpoint.files import verify_file as verify_file
    from composer_checkpoint.formats.archives import KNOWN_COMPRESSORS as KNOWN_COMPRESSORS
    from composer_checkpoint.formats.archives import CompressorNotFound as CompressorNotFound
    from composer_checkpoint.formats.archives import check_compressor as check_compressor
    from composer_checkpoint.ignore_keys import glob_filter as glob_filter
    from composer_checkpoint.inspection import FileDescription as FileDescription
    from composer_checkpoint.inspection import TensorDescription as TensorDescription
    from composer_checkpoint.inspection import inspect_file as inspect_file
    from composer_checkpoint.loader import LoadCheckpoint as LoadCheckpoint
    from composer_checkpoint.loader import load_checkpoint as load_checkpoint
    from composer_checkpoint.lock import FolderInUseError as FolderInUseError
    from composer_checkpoint.lock import FolderLock as FolderLock
    from composer_checkpoint.manifest import FORMAT_VERSION as FORMAT_VERSION
    from composer_checkpoint.manifest import MANIFEST_NAME as MANIFEST_NAME
    from composer_checkpoint.manifest import FileEntry as FileEntry
    from composer_checkpoint.manifest import Manifest as Manifest
    from composer_checkpoint.manifest import TensorEntry as TensorEntry
    from composer_checkpoint.names import PartialFilePath as PartialFilePath
    from composer_checkpoint.names import check_filename as check_filename
    from composer_checkpoint.remote.upload import RemoteUploader as RemoteUploader
    from composer_checkpoint.resume import checkpoint_to_resume as checkpoint_to_resume
    from composer_checkpoint.retention import RetentionPolicy as RetentionPolicy
    from composer_checkpoint.retention import SavedCheckpoint as SavedCheckpoint
    from composer_checkpoint.retention import choose_to_delete as choose_to_delete
    from composer_checkpoint.save_folder import Found as Found
    from composer_checkpoint.save_folder import Skipped as Skipped
    from composer_checkpoint.save_folder import (
        ensure_folder_has_no_conflicting_files as ensure_folder_has_no_conflicting_files,
    )
    from composer_checkpoint.save_folder import ensure_folder_is_empty as ensure_folder_is_empty
    from composer_checkpoint.save_folder import find_conflicts as find_conflicts
    from composer_checkpoint.save_folder import find_newest as find_newest
    from composer_checkpoint.saver import CheckpointSaver as CheckpointSaver
    from composer_checkpoint.sharded import load_sharded as load_sharded
    from composer_checkpoint.sharded import save_sharded as save_sharded
    from composer_checkpoint.sharded import verify_folder as verify_folder
    from composer_checkpoint.state import save_checkpoint as save_checkpoint

_HOME = {
    "save_file": "composer_checkpoint.files",
    "load_file": "composer_checkpoint.files",
    "read_manifest": "composer_checkpoint.files",
    "verify_file": "composer_checkpoint.files",
    "safe_torch_load": "composer_checkpoint.files",
    "FileDescription": "composer_checkpoint.inspection",
    "TensorDescription": "composer_checkpoint.inspection",
    "inspect_file": "composer_checkpoint.inspection",
    "FORMAT_VERSION": "composer_checkpoint.manifest",
    "MANIFEST_NAME": "composer_checkpoint.manifest",
    "FileEntry": "composer_checkpoint.manifest",
    "Manifest": "composer_checkpoint.manifest",
    "TensorEntry": "composer_checkpoint.manifest",
    "HASH_NAME": "composer_checkpoint.file_io",
    "hash_bytes": "composer_checkpoint.file_io",
    "hash_file": "composer_checkpoint.file_io",
    "hash_tensor": "composer_checkpoint.file_io",
    "hash_tensors": "composer_checkpoint.file_io",
    "safe_unpickle": "composer_checkpoint._pickle_inspection",
    "KNOWN_COMPRESSORS": "composer_checkpoint.formats.archives",
    "CompressorNotFound": "composer_checkpoint.formats.archives",
    "check_compressor": "composer_checkpoint.formats.archives",
    "CheckpointError": "composer_checkpoint.errors",
    "CorruptCheckpointError": "composer_checkpoint.errors",
    "UnsafeCheckpointError": "composer_checkpoint.errors",
    "IncompatibleCheckpointError": "composer_checkpoint.errors",
    "NewerCheckpointError": "composer_checkpoint.errors",
    "UnfittingOptimizerError": "composer_checkpoint.errors",
    "UnfittingWeightsError": "composer_checkpoint.errors",
    "StorageError": "composer_checkpoint.errors",
    "NoCheckpointError": "composer_checkpoint.errors",
    "CheckpointConflictError": "composer_checkpoint.errors",
    "write_atomically": "composer_checkpoint.commit",
    "replace_pointer": "composer_checkpoint.commit",
    "remove_leftovers": "composer_checkpoint.commit",
    "read_pointer": "composer_checkpoint.commit",
    "Found": "composer_checkpoint.save_folder",
    "Skipped": "composer_checkpoint.save_folder",
    "find_newest": "composer_checkpoint.save_folder",
    "RetentionPolicy": "composer_checkpoint.retention",
    "SavedCheckpoint": "composer_checkpoint.retention",
    "choose_to_delete": "composer_checkpoint.retention",
    "ensure_folder_has_no_conflicting_files": "composer_checkpoint.save_folder",
    "ensure_folder_is_empty": "composer_checkpoint.save_folder",
    "find_conflicts": "composer_checkpoint.save_folder",
    "FolderInUseError": "composer_checkpoint.lock",
    "FolderLock": "composer_checkpoint.lock",
    "PartialFilePath": "composer_checkpoint.names",
    "check_filename": "composer_checkpoint.names",
    "RemoteUploader": "composer_checkpoint.remote.upload",
    "save_sharded": "composer_checkpoint.sharded",
    "load_sharded": "composer_checkpoint.sharded",
    "verify_folder": "composer_checkpoint.sharded",
    "AsyncSaver": "composer_checkpoint.async_save",
    "CheckpointSaver": "composer_checkpoint.saver",
    "LoadCheckpoint": "composer_checkpoint.loader",
    "save_checkpoint": "composer_checkpoint.state",
    "load_checkpoint": "composer_checkpoint.loader",
    "checkpoint_to_resume": "composer_checkpoint.resume",
    "DataPosition": "composer_checkpoint.data_position",
    "glob_filter": "composer_checkpoint.ignore_keys",
}
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
        from importlib.metadata import (
            version,
        )  # imported late: reading the metadata takes longer than the rest of this file

        value: object = version("composer-checkpoint")
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Stored, so that the next access does not come here.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
