"""The store in which a remote folder lies, and what the ranks of a node have fetched of it."""

import fcntl
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_checkpoint.stores.addresses import parse_uri
from composer_checkpoint.stores.base import ObjectStore
from composer_checkpoint.stores.fsspec_store import FsspecObjectStore
from composer_checkpoint.stores.opening import maybe_create_object_store_from_uri, reach
from composer_dist import dist

__all__ = ["FetchedFolder", "fetch_once_per_node", "fetched_folder", "only_one_process", "store_of"]


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
