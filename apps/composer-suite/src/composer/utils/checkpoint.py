"""Saving and loading checkpoints."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer._client_names import _ensure_valid_checkpoint as _ensure_valid_checkpoint
    from composer_checkpoint.files import safe_torch_load as safe_torch_load
    from composer_checkpoint.formats.archives import CompressorNotFound as CompressorNotFound
    from composer_checkpoint.ignore_keys import glob_filter as glob_filter
    from composer_checkpoint.loader import load_checkpoint as load_checkpoint
    from composer_checkpoint.loader import load_sharded_checkpoint as load_sharded_checkpoint
    from composer_checkpoint.names import PartialFilePath as PartialFilePath
    from composer_checkpoint.names import is_tar as is_tar
    from composer_checkpoint.remote.fetch import download_monolithic_checkpoint as download_monolithic_checkpoint
    from composer_checkpoint.remote.fetch import download_object_or_file as download_object_or_file
    from composer_checkpoint.resume import download_checkpoint as download_checkpoint
    from composer_checkpoint.sharded.save import DistCPObjectStoreReader as DistCPObjectStoreReader
    from composer_checkpoint.sharded.save import FileSystemReaderWithValidation as FileSystemReaderWithValidation
    from composer_checkpoint.sharded.save import dist_cp_load as dist_cp_load
    from composer_checkpoint.state import get_save_filename as get_save_filename
    from composer_checkpoint.state import save_checkpoint as save_checkpoint

__all__ = [
    "CompressorNotFound",
    "DistCPObjectStoreReader",
    "FileSystemReaderWithValidation",
    "PartialFilePath",
    "dist_cp_load",
    "download_checkpoint",
    "download_monolithic_checkpoint",
    "download_object_or_file",
    "get_save_filename",
    "glob_filter",
    "is_tar",
    "load_checkpoint",
    "load_sharded_checkpoint",
    "safe_torch_load",
    "save_checkpoint",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer._client_names": ["_ensure_valid_checkpoint"],
        "composer_checkpoint.formats.archives": ["CompressorNotFound"],
        "composer_checkpoint.remote.fetch": ["download_object_or_file", "download_monolithic_checkpoint"],
        "composer_checkpoint.files": ["safe_torch_load"],
        "composer_checkpoint.ignore_keys": ["glob_filter"],
        "composer_checkpoint.loader": ["load_checkpoint", "load_sharded_checkpoint"],
        "composer_checkpoint.names": ["PartialFilePath", "is_tar"],
        "composer_checkpoint.resume": ["download_checkpoint"],
        "composer_checkpoint.sharded.save": [
            "DistCPObjectStoreReader",
            "FileSystemReaderWithValidation",
            "dist_cp_load",
        ],
        "composer_checkpoint.state": ["get_save_filename", "save_checkpoint"],
    },
    removed={"is_checkpoint_legacy_sharded": "load_checkpoint finds out by itself what a checkpoint is."},
)
