"""Where the files of a sharded checkpoint are read from."""

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from composer_checkpoint.errors import NoCheckpointError
from composer_checkpoint.retry import retry
from composer_checkpoint.sharded._targets import is_remote
from composer_checkpoint.stores.base import ObjectStoreTransientError

__all__ = ["LocalSource", "RemoteSource", "Source", "open_source"]

_ATTEMPTS = 5


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
    """A folder of a remote store. Files are fetched at their first use, and deleted with this object.

    Within `fetch_once_per_node` each file is fetched by one rank of the node, and deleted at its end.
    """

    def __init__(self, folder: str, storage_options: Mapping[str, Any]) -> None:
        # Here, so that local checkpoints do not load the stores.
        from composer_checkpoint.sharded._addresses import FetchedFolder, fetched_folder, store_of

        self.folder = folder.rstrip("/")
        shared = fetched_folder(self.folder)
        if shared is None:
            place = Path(tempfile.mkdtemp(prefix="composer-checkpoint-"))
            weakref.finalize(self, shutil.rmtree, place, ignore_errors=True)
            shared = FetchedFolder(*store_of(self.folder, storage_options), place)
        self._fetched = shared
        self._lock = threading.Lock()

    def size_bytes(self, name: str) -> int | None:
        """Return how long an object is, `None` if there is none."""
        look_up = retry(ObjectStoreTransientError, _ATTEMPTS)(self._fetched.store.get_object_size)
        try:
            return look_up(f"{self._fetched.name}/{name}")
        except FileNotFoundError:
            return None

    def local_path(self, name: str) -> Path:
        """Return the path of the fetched object."""
        from composer_checkpoint.sharded._addresses import only_one_process

        path = self._fetched.place / name
        with self._lock, only_one_process(path):
            if not path.exists():
                download = retry(ObjectStoreTransientError, _ATTEMPTS)(self._fetched.store.download_object)
                download(f"{self._fetched.name}/{name}", path)
        return path
