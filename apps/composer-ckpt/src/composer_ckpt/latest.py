"""`composer-ckpt latest`: the newest checkpoint of a folder that is whole."""

import argparse
import os
from pathlib import Path
from typing import Any

from composer_checkpoint import Found, NoCheckpointError, find_newest
from composer_checkpoint.remote.fetch import is_uri
from composer_ckpt.outcomes import Result, UsageError

__all__ = ["folder_of", "latest"]


def latest(options: argparse.Namespace) -> Result:
    """Run the command."""
    folder = folder_of(options.folder)
    found = find_newest(folder, verify=_believe if options.no_verify else None)
    if found is None:
        raise NoCheckpointError(
            f"there is no whole checkpoint in {options.folder}. `composer-ckpt verify` says of one what is wrong with "
            f"it."
        )
    return Result(os.fspath(found.path), _as_data(found, options.folder))


def folder_of(typed: str) -> Path:
    """Return the folder that was typed.

    Raises:
        UsageError: If it is none of this machine.
    """
    if is_uri(typed):
        raise UsageError(
            f"FOLDER={typed!r} is in a store, where the object latest-rank0.pt.symlink names the newest. Name a folder "
            f"of this machine."
        )
    if not os.path.isdir(typed):
        raise UsageError(f"FOLDER={typed!r} is no folder. Name the one that a run saves to.")
    return Path(typed)


def _believe(path: Path) -> None:
    """Take whatever has a checkpoint's name for whole: what is not has no such name."""


def _as_data(found: Found, folder: str) -> dict[str, Any]:
    time: Any = found.info.get("timestamp") or {}
    return {
        "folder": folder,
        "path": os.fspath(found.path),
        "timestamp": dict(time.get("Timestamp", time)),
        "skipped": [{"path": os.fspath(skip.path), "reason": skip.reason} for skip in found.skipped],
    }
