"""The folders and files of traces, as both who writes spans and who writes torch's operators keep them."""

import os
from pathlib import Path

from composer_checkpoint.conflicts import ensure_folder_is_empty
from composer_dist import dist

__all__ = ["prepare_folder", "prune"]


def prepare_folder(folder: Path, *, overwrite: bool) -> None:
    """Make a folder, which must be empty unless files may be overwritten. Every rank must call this.

    Raises:
        FileExistsError: If it is not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not overwrite:
        ensure_folder_is_empty(folder)
    dist.barrier()  # no rank writes before all have looked


def prune(paths: list[str], num_to_keep: int) -> None:
    """Delete the oldest files until so many are left; keep all if the number is negative."""
    while 0 <= num_to_keep < len(paths):
        Path(paths.pop(0)).unlink(missing_ok=True)


def open_name(folder: Path, name: str) -> Path:
    """Return a file's path in a folder, whose missing parts are made."""
    path = folder / name
    os.makedirs(path.parent, exist_ok=True)
    return path
