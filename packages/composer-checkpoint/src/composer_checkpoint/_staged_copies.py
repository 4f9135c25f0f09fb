"""Copies of files that wait for their upload, so that who handed them over may change or delete them."""

import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["StagedCopies"]


class StagedCopies:
    """Makes copies in one temporary folder.

    Args:
        folder: In which that folder is made, when it is first needed; the system's own when `None`.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._parent = folder
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._count = 0

    def make(self, file_path: str | os.PathLike[str]) -> Path:
        """Return the path of a new copy."""
        if self._folder is None:
            if self._parent is not None:
                os.makedirs(self._parent, exist_ok=True)
            self._folder = tempfile.TemporaryDirectory(prefix="composer-upload-", dir=self._parent)
        self._count += 1
        copy = Path(self._folder.name) / str(self._count)
        shutil.copyfile(file_path, copy)
        return copy

    def remove(self) -> None:
        """Delete all of them."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()
