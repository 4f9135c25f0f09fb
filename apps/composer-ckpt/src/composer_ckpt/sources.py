"""Opening what a command was given."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from composer_checkpoint.tensors import TensorSource, open_checkpoint
from composer_checkpoint.tensors.opening import Kind, follow_pointers
from composer_checkpoint.uris import get_file, is_uri
from composer_ckpt.outcomes import UsageError

__all__ = ["absolute", "fetched", "opened", "place_of"]


@contextmanager
def opened(path: str, kind: str = "auto", **options: Any) -> Iterator[TensorSource]:
    """Open a checkpoint, here or in a store.

    Args:
        path: As it was typed.
        kind: What it is, `'auto'` to find out.
        **options: Of `open_checkpoint`.
    """
    with (
        fetched(path) as local,
        open_checkpoint(local, kind=None if kind == "auto" else cast(Kind, kind), **options) as source,
    ):
        yield source


@contextmanager
def fetched(path: str) -> Iterator[str]:
    """Yield where a checkpoint lies on this machine; one file of a store is fetched for as long as it is used."""
    if not is_uri(path):
        yield path
        return
    name = path.rstrip("/").rsplit("/", 1)[-1].removesuffix(".symlink")
    if "." not in name:
        raise UsageError(
            f"{path!r} looks like a folder of a store, and only single files are fetched. Copy it here first."
        )
    with tempfile.TemporaryDirectory(prefix="composer-ckpt-") as folder:
        get_file(path, destination := os.path.join(folder, name), progress_bar=False)
        yield destination


def place_of(path: str) -> Path:
    """Return the folder or file that a path leads to."""
    return Path(follow_pointers(path))


def absolute(path: str) -> Path:
    """Return the path of what is written, which is on this machine.

    Raises:
        UsageError: If it is an address of a store.
    """
    if is_uri(path):
        raise UsageError(
            f"DST={path!r} is in a store, and checkpoints are written on this machine. Copy it afterwards."
        )
    return Path(os.path.abspath(path))
