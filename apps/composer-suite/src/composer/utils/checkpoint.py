"""Saving and loading checkpoints."""

from composer_checkpoint.archives import CompressorNotFound
from composer_checkpoint.fetching import get_file as download_object_or_file
from composer_checkpoint.files import safe_torch_load
from composer_checkpoint.ignore_keys import glob_filter
from composer_checkpoint.loader import load_checkpoint
from composer_checkpoint.names import PartialFilePath, is_tar
from composer_checkpoint.state_io import save_checkpoint
from composer_checkpoint.transfer import download_monolithic_checkpoint

__all__ = [
    "CompressorNotFound",
    "PartialFilePath",
    "download_monolithic_checkpoint",
    "download_object_or_file",
    "glob_filter",
    "is_tar",
    "load_checkpoint",
    "safe_torch_load",
    "save_checkpoint",
]
