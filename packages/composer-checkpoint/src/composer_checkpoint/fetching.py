"""Files from wherever they are: a path, a store, the web."""

import errno
import importlib.util
import logging
import os
import tempfile
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from fsspec.callbacks import TqdmCallback

from composer_checkpoint.commit import refuse_existing, write_atomically
from composer_checkpoint.errors import CorruptCheckpointError, StorageError
from composer_checkpoint.pointers import read_pointer_text
from composer_checkpoint.retry import retry
from composer_checkpoint.stores._faults import Fault, classify
from composer_checkpoint.stores.addresses import parse_uri
from composer_checkpoint.stores.base import ObjectStoreTransientError, Progress
from composer_checkpoint.stores.opening import maybe_create_object_store_from_uri, reach

__all__ = ["create_symlink_file", "download_object_or_file", "extract_path_from_symlink", "get_file"]

log = logging.getLogger(__name__)

_SYMLINK = ".symlink"
_MOST_LINKS = 8
_WEB = ("http", "https")
_SILENCE_S = 60
_CHUNK_BYTES = 1 << 20
_ATTEMPTS = 5


class _Downloads(Protocol):
    """An `ObjectStore`."""

    def download_object(self, object_name: str, filename: Any, overwrite: bool = ..., callback: Any = ...) -> None: ...


class _DownloadsFiles(Protocol):
    """A logger destination."""

    def download_file(self, remote_file_name: str, destination: str, overwrite: bool, progress_bar: bool) -> None: ...


def get_file(
    path: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    object_store: "_Downloads | _DownloadsFiles | None" = None,
    overwrite: bool = False,
    progress_bar: bool = True,
) -> None:
    """Put a file from anywhere at a local path, whole or not at all.

    A local file becomes a symbolic link at `destination`. A name that ends in `.symlink` is read, and the object that
    it names is fetched; where there is no object of a name, one with `.symlink` behind it is looked for. What may
    pass is tried five times.

    Args:
        path: A local path, an address that `maybe_create_object_store_from_uri` takes, `http(s)://`, or with
            `object_store` the name of an object.
        destination: The file that it becomes. Folders above it are made.
        object_store: Where `path` is. An `ObjectStore`, or a logger destination that can download.
        overwrite: Whether a file at `destination` is replaced.
        progress_bar: Whether to show the progress, which needs the package tqdm.

    Raises:
        FileNotFoundError: If there is no such file.
        FileExistsError: If `destination` exists and `overwrite` is false.
        CorruptCheckpointError: If a `.symlink` object is no pointer, or pointers lead in a circle.
        ObjectStoreTransientError: If the store still failed at the last attempt, with the cause.
    """
    path, destination = os.fspath(path), os.fspath(destination)
    owned = None
    if object_store is None:
        if parse_uri(path).backend in _WEB:
            _fetch_from_web(path, destination, overwrite, progress_bar)
            return
        owned = maybe_create_object_store_from_uri(path)
        if owned is None:
            _link_local(path, destination, overwrite)
            return
        reach(owned, path)
        object_store = owned
        path = parse_uri(path).path
    elif parse_uri(path).backend:
        path = parse_uri(path).path
    try:
        _fetch_or_follow(object_store, path, destination, overwrite, progress_bar)
    finally:
        if owned is not None:
            owned.close()


def download_object_or_file(
    object_name: str, file_destination: str | os.PathLike[str], object_store: "_Downloads | _DownloadsFiles"
) -> None:
    """Copy an object to a local file, which must not exist, from a store or from a logger that can download.

    Pointers are not followed.

    Args:
        object_name: The object.
        file_destination: The file that it becomes. Folders above it are made.
        object_store: An `ObjectStore`, or a logger destination.

    Raises:
        FileNotFoundError: If there is no such object.
        FileExistsError: If the file exists.
    """
    _fetch(object_store, object_name, os.fspath(file_destination), False, False)


def create_symlink_file(existing_path: str | os.PathLike[str], destination_filename: str | os.PathLike[str]) -> None:
    """Write a pointer that stores can hold: a text file with a path.

    Args:
        existing_path: What it names.
        destination_filename: The file, which must end in `.symlink` and not exist.

    Raises:
        ValueError: If it ends in something else.
        FileExistsError: If it exists.
    """
    name = os.fspath(destination_filename)
    if not name.endswith(_SYMLINK):
        raise ValueError(f"destination_filename={name!r} must end in {_SYMLINK!r}, so that it is known as a pointer.")
    with open(name, "x") as file:
        file.write(os.fspath(existing_path))


def extract_path_from_symlink(
    source_path: str | os.PathLike[str], object_store: "_Downloads | _DownloadsFiles | None" = None
) -> str:
    """Return what a pointer names: a `.symlink` object of a store, or a local symbolic link.

    Raises:
        FileNotFoundError: If there is no such pointer.
        CorruptCheckpointError: If it is no pointer.
    """
    if object_store is None:
        return os.readlink(source_path)
    return _read_remote_pointer(object_store, os.fspath(source_path))


def _fetch_or_follow(store: Any, name: str, destination: str, overwrite: bool, progress_bar: bool) -> None:
    try:
        _fetch(store, _resolve(store, name), destination, overwrite, progress_bar)
    except FileNotFoundError as error:
        if name.endswith(_SYMLINK):
            raise
        try:
            target = _resolve(store, name + _SYMLINK)
        except FileNotFoundError:
            raise error from error.__cause__
        _fetch(store, target, destination, overwrite, progress_bar)


def _resolve(store: Any, name: str) -> str:
    """Follow pointers to the name of an object that is none."""
    for _ in range(_MOST_LINKS):
        if not name.endswith(_SYMLINK):
            return name
        name = _read_remote_pointer(store, name)
    raise CorruptCheckpointError(
        f"{name!r} is reached through more than {_MOST_LINKS} pointers, so they probably lead in a circle. Name the "
        f"checkpoint itself."
    )


def _read_remote_pointer(store: Any, name: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, "pointer")
        _fetch(store, name, copy, False, False)
        target = read_pointer_text(Path(copy).read_bytes(), name)
    if ".." in target.split("/"):
        raise CorruptCheckpointError(f"{name} points to {target!r}, which leads out of its store. Name the checkpoint.")
    log.debug("%s points to %s", name, target)
    return parse_uri(target).path


def _fetch(store: Any, name: str, destination: str, overwrite: bool, progress_bar: bool) -> None:
    if not hasattr(store, "download_object") and not hasattr(store, "download_file"):
        raise TypeError(
            f"object_store={store!r} cannot download. Give an ObjectStore, or a logger such as "
            f"RemoteUploaderDownloader; or leave it out, if the path is an address."
        )
    os.makedirs(os.path.dirname(os.path.abspath(destination)), exist_ok=True)
    if not hasattr(store, "download_object"):
        store.download_file(name, destination, overwrite, progress_bar)
        return
    download = retry(ObjectStoreTransientError, num_attempts=_ATTEMPTS)(store.download_object)
    with _Bar(name, progress_bar) as bar:
        download(name, destination, overwrite=overwrite, callback=bar)


def _link_local(path: str, destination: str, overwrite: bool) -> None:
    if not os.path.exists(path):
        raise FileNotFoundError(errno.ENOENT, f"Local path {path} does not exist", path)
    os.makedirs(os.path.dirname(os.path.abspath(destination)), exist_ok=True)
    if overwrite:
        with suppress(FileNotFoundError):
            os.unlink(destination)
    os.symlink(os.path.abspath(path), destination)


@retry(ObjectStoreTransientError, num_attempts=_ATTEMPTS)
def _fetch_from_web(url: str, destination: str, overwrite: bool, progress_bar: bool) -> None:
    refuse_existing(Path(destination), overwrite)
    done = 0
    try:
        with urllib.request.urlopen(url, timeout=_SILENCE_S) as answer, _Bar(url, progress_bar) as bar:
            total = int(answer.headers.get("Content-Length", -1))
            with write_atomically(destination, overwrite=overwrite, need_bytes=max(total, 0)) as unfinished:
                with unfinished.open("wb") as file:
                    while chunk := answer.read(_CHUNK_BYTES):
                        done += file.write(chunk)
                        bar(done, max(total, done))
                if 0 <= total != done:
                    raise ObjectStoreTransientError(f"{done} of the {total} bytes of {url} came. Download it again.")
    except (StorageError, FileExistsError):
        raise
    except OSError as error:
        raise _explained(error, url) from error


def _explained(error: OSError, url: str) -> Exception:
    if isinstance(error, urllib.error.HTTPError):
        error.close()
    match classify(error):
        case Fault.MISSING:
            return FileNotFoundError(f"{url} does not exist: {error}. Look at the address.")
        case Fault.TRANSIENT:
            return ObjectStoreTransientError(f"{url} could not be fetched: {error}. Try again.")
    return StorageError(f"{url} could not be fetched: {error}. Look at the address and at who may read it.")


class _Bar:
    """A progress bar, where it is wanted and tqdm is installed; a callback of stores."""

    def __init__(self, name: str, wanted: bool) -> None:
        self._name, self._wanted = name, wanted
        self._bar: Any = None

    def __enter__(self) -> "Progress | Any":
        if self._wanted and importlib.util.find_spec("tqdm") is None:
            log.info("Downloading %s (the package tqdm would show a progress bar)", self._name)
        elif self._wanted:
            settings = {"desc": f"Downloading {self._name}", "unit": "B", "unit_scale": True}
            self._bar = TqdmCallback(tqdm_kwargs=settings)
        return self

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.set_size(total)
            self._bar.absolute_update(done)

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.close()
