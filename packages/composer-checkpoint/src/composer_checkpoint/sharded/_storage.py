"""Where the files of a sharded checkpoint are written: aside first, and seen only when all of them are there."""

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
from typing import Any, BinaryIO, Protocol, cast

from composer_checkpoint.commit import write_atomically
from composer_checkpoint.errors import CheckpointConflictError, NoCheckpointError
from composer_checkpoint.manifest import MANIFEST_NAME
from composer_checkpoint.stores.base import ObjectStore, ObjectStoreTransientError, parse_uri, retry
from composer_checkpoint.stores.fsspec import FsspecObjectStore
from composer_checkpoint.stores.opening import maybe_create_object_store_from_uri, reach
from composer_dist import dist

__all__ = [
    "FetchedFolder",
    "fetch_once_per_node",
    "fetched_folder",
    "only_one_process",
    "store_of",
    "LocalSource",
    "RemoteSource",
    "Source",
    "open_source",
    "METADATA_NAME",
    "LocalTarget",
    "RemoteTarget",
    "Target",
    "is_remote",
    "open_target",
]

METADATA_NAME = ".metadata"


class Target(Protocol):
    """A folder in the making. Rank 0 begins and ends it; every rank writes files into the place it was told."""

    def begin(self, need_bytes: int) -> str:
        """Refuse what must not be overwritten or cannot fit, and return the place where files go for now."""
        ...

    def open(self, place: str, name: str) -> BinaryIO:
        """Open a new file for writing."""
        ...

    def commit(self) -> None:
        """Let what was written be seen under the folder's own name."""
        ...

    def abort(self, error: BaseException) -> None:
        """Remove what was written."""
        ...


def is_remote(folder: str | os.PathLike[str]) -> bool:
    """Return whether this is a URI and not a local path."""
    return isinstance(folder, str) and "://" in folder


def open_target(folder: str | os.PathLike[str], overwrite: bool, storage_options: dict[str, Any]) -> Target:
    """Return the target for a local path or a URI that fsspec knows."""
    if is_remote(folder):
        return RemoteTarget(cast(str, folder), overwrite, storage_options)
    return LocalTarget(Path(folder), overwrite)


class LocalTarget:
    """A folder that gets its name by one rename."""

    def __init__(self, folder: Path, overwrite: bool) -> None:
        self._folder = folder
        self._overwrite = overwrite
        self._unfinished = ExitStack()

    def begin(self, need_bytes: int) -> str:
        """Make a temporary folder beside the real one."""
        _refuse_other_folder(self._folder)
        settings = {"overwrite": self._overwrite, "folder": True, "keep_others": True}
        unfinished = write_atomically(self._folder, need_bytes=need_bytes, **settings)
        return str(self._unfinished.enter_context(unfinished))

    def open(self, place: str, name: str) -> BinaryIO:
        """Open a file of the temporary folder."""
        return Path(place, name).open("xb")

    def commit(self) -> None:
        """Flush and rename."""
        self._unfinished.close()

    def abort(self, error: BaseException) -> None:
        """Remove the temporary folder."""
        unfinished, self._unfinished = self._unfinished, ExitStack()
        try:
            unfinished.__exit__(type(error), error, error.__traceback__)
        except BaseException as same:
            if same is not error and same.__cause__ is not error:
                raise


def _refuse_other_folder(folder: Path) -> None:
    """Raise if a folder would be replaced that holds something, and no sharded checkpoint."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    is_sharded = any(name in (METADATA_NAME, MANIFEST_NAME) or name.endswith(".distcp") for name in names)
    if names and not is_sharded:
        raise CheckpointConflictError(
            f"{folder} is a folder with {', '.join(names[:5])}, which is no sharded checkpoint, and only such a one is "
            f"replaced. Choose another name, or remove the folder yourself."
        )


class RemoteTarget:
    """A folder of a remote store, where nothing can be renamed: the manifest, which makes it whole, comes last."""

    def __init__(self, folder: str, overwrite: bool, storage_options: dict[str, Any]) -> None:
        # Here, so that local checkpoints do not load the stores.
        from composer_checkpoint.stores.fsspec import FsspecObjectStore

        store, name = store_of(folder, storage_options)
        if not isinstance(store, FsspecObjectStore):
            raise ValueError(
                f"folder={folder!r}: {type(store).__name__} takes whole files only, and a sharded checkpoint is "
                f"written piece by piece. Save to S3 or another store that fsspec reaches, or one file with "
                f"state_dict_type='full'."
            )
        self._store, self._root = store.filesystem, store.filesystem_path(name)
        self._store.invalidate_cache()  # stores remember listings, and others write
        self._folder = folder.rstrip("/")
        self._overwrite = overwrite

    def begin(self, need_bytes: int) -> str:
        """Take away what made an older checkpoint of this name whole, if it may be overwritten."""
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
        """Open an object of the folder."""
        return cast(BinaryIO, self._store.open(f"{place}/{name}", "wb"))

    def commit(self) -> None:
        """Do nothing more: the manifest was written last."""

    def abort(self, error: BaseException) -> None:
        """Leave what was written; without a manifest and `.metadata` nobody takes it for a checkpoint."""


@dataclass(frozen=True, slots=True)
class FetchedFolder:
    """A folder of a store, and where on this machine its files go."""

    store: ObjectStore
    name: str
    place: Path


_shared: ContextVar[Mapping[str, FetchedFolder]] = ContextVar("_shared", default={})  # noqa: B039  # never changed


def store_of(folder: str, storage_options: Mapping[str, Any]) -> tuple[ObjectStore, str]:
    """Return the store of an address, and the folder's name in it.

    Credentials, servers and known hosts are those of the store's class, unless there are options for fsspec.
    """
    folder = folder.rstrip("/")
    if storage_options:
        parent, _, name = folder.rpartition("/")
        return FsspecObjectStore(parent, **storage_options), name
    try:
        store = maybe_create_object_store_from_uri(folder)
    except NotImplementedError:  # nothing is saved there; fsspec may read it all the same
        store = None
    if store is None:
        parent, _, name = folder.rpartition("/")
        return FsspecObjectStore(parent), name
    reach(store, folder)
    return store, parse_uri(folder).path


def fetched_folder(folder: str) -> FetchedFolder | None:
    """Return where the ranks of this node share what they fetch of a folder, if they do."""
    return _shared.get().get(folder.rstrip("/"))


@contextmanager
def fetch_once_per_node(store: ObjectStore, name: str) -> Iterator[str]:
    """Let the ranks of each node share what any of them fetches of a folder. Every rank must call this.

    Args:
        store: Where the folder is.
        name: What the names of its objects begin with.

    Yields:
        The folder's address; those who open it find the files that are there already.
    """
    address = store.get_uri(name).rstrip("/")
    with tempfile.TemporaryDirectory(prefix="composer-fetch-") as own:
        places = dist.all_gather_object((dist.get_node_rank(), own))
        place = next(place for node, place in places if node == dist.get_node_rank())
        token = _shared.set({**_shared.get(), address: FetchedFolder(store, name, Path(place))})
        try:
            yield address
        finally:
            _shared.reset(token)
        dist.barrier()  # others may still read what this rank deletes


@contextmanager
def only_one_process(path: Path) -> Iterator[None]:
    """Let one process of this machine at a time bring a file into being."""
    with path.with_name(f".{path.name}.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        yield


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

        path = self._fetched.place / name
        with self._lock, only_one_process(path):
            if not path.exists():
                download = retry(ObjectStoreTransientError, _ATTEMPTS)(self._fetched.store.download_object)
                download(f"{self._fetched.name}/{name}", path)
        return path
