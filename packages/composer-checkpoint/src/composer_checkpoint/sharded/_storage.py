"""Folders of sharded checkpoints in local and remote storage, written under a temporary name or without a manifest."""

import fcntl
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from composer_checkpoint._ranks import of_first_rank_of_node
from composer_checkpoint.commit import write_atomically
from composer_checkpoint.errors import CheckpointConflictError, NoCheckpointError
from composer_checkpoint.manifest import MANIFEST_NAME, METADATA_NAME
from composer_checkpoint.stores.base import ObjectStore, ObjectStoreTransientError, parse_uri, retry
from composer_dist import dist


class FolderOfCheckpoint:
    """Path of the folder of a reader or a writer, which DCP asks for."""

    _folder: str

    @property
    def checkpoint_id(self) -> str:
        """Return the path of the folder."""
        return self._folder

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return true; errors are raised on reading and writing."""
        return True


def is_remote(folder: str | os.PathLike[str]) -> bool:
    return isinstance(folder, str) and "://" in folder


def open_target(
    folder: str | os.PathLike[str], overwrite: bool, storage_options: dict[str, Any]
) -> "LocalTarget | RemoteTarget":
    if is_remote(folder):
        return RemoteTarget(cast(str, folder), overwrite, storage_options)
    return LocalTarget(Path(folder), overwrite)


class LocalTarget:
    """Folder that gets its final name by one rename."""

    def __init__(self, folder: Path, overwrite: bool) -> None:
        self._folder = folder
        self._overwrite = overwrite
        self._unfinished = ExitStack()

    def begin(self, need_bytes: int) -> str:
        names = sorted(os.listdir(self._folder)) if self._folder.is_dir() else []
        is_sharded = any(name in (METADATA_NAME, MANIFEST_NAME) or name.endswith(".distcp") for name in names)
        if names and not is_sharded:
            raise CheckpointConflictError(
                f"{self._folder} is a folder with {', '.join(names[:5])}, which is no sharded checkpoint, and only "
                f"such a one is replaced. Choose another name, or remove the folder yourself."
            )
        settings = {"overwrite": self._overwrite, "folder": True, "keep_others": True}
        unfinished = write_atomically(self._folder, need_bytes=need_bytes, **settings)
        return str(self._unfinished.enter_context(unfinished))

    def open(self, place: str, name: str) -> BinaryIO:
        return Path(place, name).open("xb")  # fails if the file exists

    def commit(self) -> None:
        self._unfinished.close()

    def abort(self, error: BaseException) -> None:
        unfinished, self._unfinished = self._unfinished, ExitStack()
        try:
            unfinished.__exit__(type(error), error, error.__traceback__)
        except BaseException as same:  # the context manager raises the error passed to it, or one caused by it
            if same is not error and same.__cause__ is not error:
                raise


class RemoteTarget:
    """Folder of a remote store. Stores cannot rename, so the manifest is written last and marks the folder as whole."""

    def __init__(self, folder: str, overwrite: bool, storage_options: dict[str, Any]) -> None:
        from composer_checkpoint.stores.fsspec import FsspecObjectStore

        store, name = store_of(folder, storage_options)
        if not isinstance(store, FsspecObjectStore):
            raise ValueError(
                f"folder={folder!r}: {type(store).__name__} takes whole files only, and a sharded checkpoint is "
                f"written piece by piece. Save to S3 or another store that fsspec reaches, or one file with "
                f"state_dict_type='full'."
            )
        self._store, self._root = store.filesystem, store.filesystem_path(name)
        self._store.invalidate_cache()  # fsspec caches listings, and other processes write
        self._folder = folder.rstrip("/")
        self._overwrite = overwrite

    def begin(self, need_bytes: int) -> str:
        """Delete the files that make an earlier checkpoint of this name whole, if it may be overwritten."""
        for name in (MANIFEST_NAME, METADATA_NAME):
            if not self._store.exists(f"{self._root}/{name}"):
                continue
            if not self._overwrite:
                raise CheckpointConflictError(
                    f"{self._folder} holds a checkpoint, and overwrite=False. Choose another name, or pass "
                    f"overwrite=True to replace it."
                )
            self._store.rm_file(f"{self._root}/{name}")
        self._store.makedirs(self._root, exist_ok=True)
        return self._root

    def open(self, place: str, name: str) -> BinaryIO:
        return cast(BinaryIO, self._store.open(f"{place}/{name}", "wb"))

    def commit(self) -> None:
        """Do nothing: the manifest was written last."""

    def abort(self, error: BaseException) -> None:
        """Do nothing: without a manifest and `.metadata` the files are not a checkpoint."""


@dataclass(frozen=True, slots=True)
class FetchedFolder:
    store: ObjectStore
    name: str
    place: Path


# The local folder that the ranks of this node share for a remote folder.
_shared: ContextVar[Mapping[str, FetchedFolder]] = ContextVar("_shared", default={})  # noqa: B039  # never changed


def store_of(folder: str, storage_options: Mapping[str, Any]) -> tuple[ObjectStore, str]:
    """Return the store of a URI, and the folder's name in it.

    Credentials, servers and known hosts are those of the store's class, unless there are options for fsspec.
    """
    # Imported here so that local checkpoints do not load the stores.
    from composer_checkpoint.stores.fsspec import FsspecObjectStore
    from composer_checkpoint.stores.opening import maybe_create_object_store_from_uri, reach

    folder = folder.rstrip("/")
    if storage_options:
        parent, _, name = folder.rpartition("/")
        return FsspecObjectStore(parent, **storage_options), name
    try:
        store = maybe_create_object_store_from_uri(folder)
    except NotImplementedError:  # not a store for saving, but fsspec may read from it
        store = None
    if store is None:
        parent, _, name = folder.rpartition("/")
        return FsspecObjectStore(parent), name
    reach(store, folder)  # fails early if the store cannot be reached
    return store, parse_uri(folder).path


@contextmanager
def fetch_once_per_node(store: ObjectStore, name: str) -> Iterator[str]:
    """Download each file of a folder of a store once per node, for all of its ranks. Every rank must call this.

    Yields the folder's URI; opening it uses the files that were already downloaded.
    """
    address = store.get_uri(name).rstrip("/")
    with tempfile.TemporaryDirectory(prefix="composer-fetch-") as own:
        place = Path(of_first_rank_of_node(own))
        token = _shared.set({**_shared.get(), address: FetchedFolder(store, name, place)})
        try:
            yield address
        finally:
            _shared.reset(token)
        dist.barrier()  # other ranks may still read the files that this rank deletes


def open_source(folder: str | os.PathLike[str], storage_options: Mapping[str, Any]) -> "LocalSource | StoreSource":
    if not is_remote(folder):
        return LocalSource(Path(folder))
    address = os.fspath(folder).rstrip("/")
    if (shared := _shared.get().get(address)) is not None:
        return StoreSource(address, shared, is_temporary=True)
    place = Path(tempfile.mkdtemp(prefix="composer-checkpoint-"))
    source = StoreSource(address, FetchedFolder(*store_of(address, storage_options), place), is_temporary=True)
    # Sources are not closed, so the files are deleted together with the object.
    weakref.finalize(source, shutil.rmtree, place, ignore_errors=True)
    return source


class LocalSource:
    """Folder on this machine, or a link to one."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        if not folder.exists():
            raise NoCheckpointError(f"{folder} does not exist, so no sharded checkpoint can be read from it.")
        if not folder.is_dir():
            raise NotADirectoryError(
                f"{folder} is a file, and a sharded checkpoint is a folder. Load it as a single file, or name the "
                f"folder that holds `.metadata`."
            )
        # Resolved, since a link may be moved to a newer checkpoint while this one is read.
        self._root = folder.resolve()

    def size_bytes(self, name: str) -> int | None:
        try:
            return (self._root / name).stat().st_size
        except FileNotFoundError:
            return None

    def local_path(self, name: str) -> Path:
        return self._root / name


class StoreSource:
    """Folder of a store. Files are downloaded on first use, each by one process of this machine.

    In a local folder that `is_temporary`, a file is whole if it exists.
    """

    def __init__(self, folder: str, fetched: FetchedFolder, *, is_temporary: bool) -> None:
        self.folder = folder
        self._fetched, self._is_temporary = fetched, is_temporary
        self._lock = threading.Lock()

    def size_bytes(self, name: str) -> int | None:
        try:
            return _again(self._fetched.store.get_object_size)(f"{self._fetched.name}/{name}")
        except FileNotFoundError:
            return None

    def local_path(self, name: str) -> Path:
        path = self._fetched.place / name
        with self._lock, path.with_name(f".{path.name}.lock").open("wb") as lock:
            # Held, among the processes of this machine, until the file is closed.
            fcntl.flock(lock, fcntl.LOCK_EX)
            # In a folder that is kept, a download that was interrupted has left a shorter file.
            if not path.exists() or not (self._is_temporary or path.stat().st_size == self.size_bytes(name)):
                _again(self._fetched.store.download_object)(f"{self._fetched.name}/{name}", path, overwrite=True)
        return path


_again = retry(ObjectStoreTransientError, num_attempts=5)

Source = LocalSource | StoreSource
"""Folder of files to read."""
