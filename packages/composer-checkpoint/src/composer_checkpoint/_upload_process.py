"""Uploading in a process of its own, which keeps the store open for the next file."""

import pickle
from functools import cache
from pathlib import Path

from composer_checkpoint.publish import upload_with_retries
from composer_checkpoint.stores.base import ObjectStore
from composer_checkpoint.stores.opening import open_store

__all__ = ["upload_in_process"]


def upload_in_process(settings: bytes, name: str, source: Path, overwrite: bool, num_attempts: int) -> None:
    """Upload a file with `upload_with_retries`.

    Args:
        settings: The pickled arguments of `open_store`, from the process that started this one.
        name: The object's name.
        source: The file.
        overwrite: Whether an object that has the name is replaced.
        num_attempts: How often it is tried.
    """
    upload_with_retries(_store(settings), name, source, overwrite=overwrite, num_attempts=num_attempts)


@cache
def _store(settings: bytes) -> ObjectStore:
    return open_store(*pickle.loads(settings))
