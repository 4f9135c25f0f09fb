"""Where a part of a checkpoint lies: a file that rank 0 reads, or a folder that all ranks read."""

import os
import posixpath
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from composer_checkpoint.errors import NoCheckpointError
from composer_checkpoint.fetching import get_file
from composer_checkpoint.files import load_file
from composer_checkpoint.safetensors_index import INDEX_SUFFIX, read_index
from composer_checkpoint.sharded._ranks import Ranks
from composer_checkpoint.sharded._targets import METADATA_NAME
from composer_checkpoint.stores.addresses import is_uri, parse_uri
from composer_checkpoint.stores.fsspec_store import FsspecObjectStore
from composer_checkpoint.stores.opening import maybe_create_object_store_from_uri, reach

__all__ = ["Source", "find_source", "read_on_rank_zero"]


_SUFFIXES = ("pt", "safetensors", "safetensors.index.json")


@dataclass(frozen=True, slots=True)
class Source:
    """A file, or the folder of a sharded checkpoint, with what fsspec needs to reach it."""

    path: str
    is_sharded: bool
    storage_options: Mapping[str, Any] = field(default_factory=dict)


def find_source(path: str | os.PathLike[str], part: str, is_sharded: bool | None) -> Source:
    """Find out what there is at a path. Every rank must call this; rank 0 looks, for all.

    Args:
        path: A file or a folder, here or in a store. In a folder that is not a sharded checkpoint, the file is the one
            that the part has, such as `model.pt`.
        part: `'model'` or `'optim'`.
        is_sharded: Which kind is expected; `None` for either.

    Raises:
        NoCheckpointError: If there is nothing.
        ValueError: If there is the other kind.
    """
    ranks = Ranks()

    def look() -> Source | None:
        return _look(os.fspath(path), part, is_sharded) if ranks.rank == 0 else None

    found = ranks.exchange(look, lambda results: results[:1] * len(results))
    assert found is not None  # rank 0's
    return found


@contextmanager
def read_on_rank_zero(path: str | os.PathLike[str], prepare: Callable[[Any], Any], *, trusted: bool) -> Iterator[Any]:
    """Yield what `prepare` makes of a file's content, and on other ranks `None`. Every rank must enter it.

    The tensors are the mapped file's, and must not be used after the end. What cannot be read or prepared is an error
    on all ranks.
    """
    ranks = Ranks()
    contents: list[Any] = [None] * bool(ranks.rank)
    with tempfile.TemporaryDirectory(prefix="composer-checkpoint-") as folder:

        def read() -> None:
            local = os.fspath(path)
            if is_uri(local):
                local = os.path.join(folder, posixpath.basename(parse_uri(local).path))
                get_file(path, local, progress_bar=False)
                if local.endswith(INDEX_SUFFIX):
                    for shard in read_index(local).shards:
                        get_file(posixpath.join(posixpath.dirname(os.fspath(path)), shard), os.path.join(folder, shard))
            contents.append(prepare(load_file(local, trusted=trusted)))

        ranks.together(read if ranks.rank == 0 else lambda: None)
        yield contents[0]


def _look(path: str, part: str, wanted: bool | None) -> Source:
    exists, join, source = _local_place() if not is_uri(path) else _remote_place(path)
    files = [path, *(join(path, f"{part}.{suffix}") for suffix in _SUFFIXES)]
    if exists(join(path, METADATA_NAME)) and wanted is not False:
        return source(path)
    file = next((file for file in files if exists(file)), None)
    if file is None:
        if exists(join(path, METADATA_NAME)):
            raise ValueError(
                f"{path} is a sharded checkpoint, and sharded_checkpoint=False. Pass sharded_checkpoint=True, or None "
                f"to load either kind."
            )
        raise NoCheckpointError(
            f"there is no checkpoint at {path!r}: neither this file nor a folder with {METADATA_NAME} or {part}.pt in "
            f"it. Check the path."
        )
    if wanted:
        raise ValueError(
            f"{file} is a file, and sharded_checkpoint=True: a sharded checkpoint is a folder with {METADATA_NAME}. "
            f"Name the folder, or pass sharded_checkpoint=None to load either kind."
        )
    return Source(file, is_sharded=False)


def _local_place() -> tuple[Callable[[str], bool], Callable[..., str], Callable[[str], Source]]:
    return os.path.isfile, os.path.join, lambda folder: Source(folder, is_sharded=True)


def _remote_place(uri: str) -> tuple[Callable[[str], bool], Callable[..., str], Callable[[str], Source]]:
    store = maybe_create_object_store_from_uri(uri)
    assert store is not None  # it is no local path
    reach(store, uri)

    def exists(address: str) -> bool:
        try:
            store.get_object_size(parse_uri(address).path)
        except FileNotFoundError:
            return False
        return True

    def source(folder: str) -> Source:
        if not isinstance(store, FsspecObjectStore):
            raise ValueError(
                f"{folder} is a sharded checkpoint in a store whose files cannot be read in parts. Download the folder "
                f"with composer_checkpoint.publish.fetch_checkpoint(), and load it from there."
            )
        return Source(store.get_uri(parse_uri(folder).path), True, store.filesystem.storage_options)

    return exists, posixpath.join, source
