"""Where the files of a sharded checkpoint are read from."""

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from composer_checkpoint.errors import NoCheckpointError
from composer_checkpoint.sharded._targets import is_remote

__all__ = ["LocalSource", "RemoteSource", "Source", "open_source"]


class Source(Protocol):
    """A folder of files."""

    folder: str

    def size_bytes(self, name: str) -> int | None:
        """Return how long a file is, `None` if there is none."""
        ...

    def local_path(self, name: str) -> Path:
        """Return where on this machine the file can be read."""
        ...


def open_source(folder: str | os.PathLike[str], storage_options: Mapping[str, Any]) -> Source:
    """Return the source for a local path or a URI that fsspec knows."""
    if is_remote(folder):
        return RemoteSource(cast(str, folder), storage_options)
    return LocalSource(Path(folder))


class LocalSource:
    """A folder of this machine, or a link to one.

    Raises:
        NoCheckpointError: If there is none.
        NotADirectoryError: If it is a file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        if not folder.exists():
            raise NoCheckpointError(f"{folder} does not exist, so no sharded checkpoint can be read from it.")
        if not folder.is_dir():
            raise NotADirectoryError(
                f"{folder} is a file, and a sharded checkpoint is a folder. Load it as a single file, or name the "
                f"folder that holds `.metadata`."
            )
        # A link may be moved to a newer checkpoint while this one is read.
        self._root = folder.resolve()

    def size_bytes(self, name: str) -> int | None:
        """Return how long a file is, `None` if there is none."""
        try:
            return (self._root / name).stat().st_size
        except FileNotFoundError:
            return None

    def local_path(self, name: str) -> Path:
        """Return the file's path."""
        return self._root / name


class RemoteSource:
    """A folder of a remote store. Files are fetched at their first use, and deleted with this object."""

    def __init__(self, folder: str, storage_options: Mapping[str, Any]) -> None:
        from fsspec.core import url_to_fs  # here, so that local checkpoints do not load it

        self.folder = folder.rstrip("/")
        self._store, self._root = url_to_fs(self.folder, **storage_options)
        self._store.invalidate_cache()  # stores remember listings, and others write
        self._fetched = Path(tempfile.mkdtemp(prefix="composer-checkpoint-"))
        weakref.finalize(self, shutil.rmtree, self._fetched, ignore_errors=True)
        self._lock = threading.Lock()

    def size_bytes(self, name: str) -> int | None:
        """Return how long an object is, `None` if there is none."""
        try:
            return int(self._store.size(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None

    def local_path(self, name: str) -> Path:
        """Return the path of the fetched object."""
        path = self._fetched / name
        with self._lock:
            if not path.exists():
                unfinished = path.with_name(f"{name}.part")
                far = cast(BinaryIO, self._store.open(f"{self._root}/{name}", "rb"))
                with far, unfinished.open("wb") as near:
                    shutil.copyfileobj(far, near, 1 << 24)
                unfinished.replace(path)
        return path
