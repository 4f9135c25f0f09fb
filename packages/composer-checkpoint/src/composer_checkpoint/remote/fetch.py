"""Downloads of files from local paths, object stores and the web."""

import errno
import importlib.util
import logging
import os
import posixpath
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fsspec.callbacks import TqdmCallback

from composer_checkpoint.commit import read_pointer_text, refuse_existing, write_atomically
from composer_checkpoint.errors import CorruptCheckpointError, StorageError
from composer_checkpoint.remote.publish import SYMLINK_SUFFIX
from composer_checkpoint.remote.upload import RemoteUploader
from composer_checkpoint.stores.base import Fault, ObjectStoreTransientError, Progress, classify, parse_uri, retry
from composer_checkpoint.stores.opening import maybe_create_object_store_from_uri, reach
from composer_dist.env import get_global_rank, get_local_rank, get_node_rank
from composer_events.callback import Callback

if TYPE_CHECKING:
    from composer_events import Logger, State

log = logging.getLogger(__name__)

_MOST_LINKS = 8  # more are considered a cycle
_WEB = ("http", "https")
_SILENCE_S = 60  # maximum wait for the next bytes from a web server
_CHUNK_BYTES = 1 << 20
_ATTEMPTS = 5


def get_file(
    path: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    object_store: Any = None,
    overwrite: bool = False,
    progress_bar: bool = True,
) -> None:
    """Fetch a file from a local path, an object store or the web, atomically.

    For a local file, `destination` becomes a symbolic link. A name that ends in `.symlink` is followed to the object
    that it points to; if an object does not exist, its name with `.symlink` appended is tried. Transient errors are
    retried, up to five attempts.

    Args:
        path: A local path, an address that `maybe_create_object_store_from_uri` takes, `http(s)://`, or with
            `object_store` the name of an object.
        destination: Local file to write. Its parent folders are created.
        object_store: `ObjectStore` that holds `path`, or a logger destination that can download.
        overwrite: Whether to replace a file at `destination`.
        progress_bar: Whether to show the progress, which needs the package tqdm.

    Raises:
        FileNotFoundError: If the file does not exist.
        FileExistsError: If `destination` exists and `overwrite` is false.
        CorruptCheckpointError: If a `.symlink` object is not a valid pointer, or pointers form a cycle.
        ObjectStoreTransientError: If the last attempt failed too; the cause is attached.
    """
    path, destination, owned = os.fspath(path), os.fspath(destination), None
    if object_store is None:
        if parse_uri(path).backend in _WEB:
            _fetch_from_web(path, destination, overwrite, progress_bar)
            return
        owned = maybe_create_object_store_from_uri(path)
        if owned is None:
            if not os.path.exists(path):
                raise FileNotFoundError(errno.ENOENT, f"Local path {path} does not exist", path)
            os.makedirs(os.path.dirname(os.path.abspath(destination)), exist_ok=True)
            if overwrite:
                with suppress(FileNotFoundError):
                    os.unlink(destination)
            os.symlink(os.path.abspath(path), destination)  # a copy would take time and disk space
            return
        reach(owned, path)  # fails much sooner than the retries of client libraries
        object_store = owned
    name = parse_uri(path).path
    try:
        _fetch(object_store, _resolve(object_store, name), destination, overwrite, progress_bar)
    except FileNotFoundError as error:
        if name.endswith(SYMLINK_SUFFIX):
            raise
        try:
            target = _resolve(object_store, name + SYMLINK_SUFFIX)
        except FileNotFoundError:
            raise error from error.__cause__  # names the requested object, not the pointer
        _fetch(object_store, target, destination, overwrite, progress_bar)
    finally:
        if owned is not None:
            owned.close()


def get_file_and_shards(path: str, destination: str, object_store: Any = None, progress_bar: bool = True) -> None:
    """Fetch a file and, if it is an index of several files, these too, since they must be next to it to be loaded."""
    # Here, since they import torch, which is slow.
    from composer_checkpoint.formats.archives import INDEX_SUFFIX
    from composer_checkpoint.formats.safetensors import read_index

    get_file(path, destination, object_store, overwrite=True, progress_bar=progress_bar)
    for shard in read_index(destination).shards if destination.endswith(INDEX_SUFFIX) else ():
        source, target = (os.path.join(os.path.dirname(place), shard) for place in (path, destination))
        get_file(source, target, object_store, overwrite=True, progress_bar=progress_bar)


def download_object_or_file(object_name: str, file_destination: str | os.PathLike[str], object_store: Any) -> None:
    """Download an object to a local file that does not exist yet.

    Pointers are not followed.

    Args:
        object_name: Name of the object.
        file_destination: Local file to write. Its parent folders are created.
        object_store: An `ObjectStore`, or a logger destination that can download.

    Raises:
        FileNotFoundError: If the object does not exist.
        FileExistsError: If the file exists.
    """
    _fetch(object_store, object_name, os.fspath(file_destination), False, False)


def create_symlink_file(existing_path: str | os.PathLike[str], destination_filename: str | os.PathLike[str]) -> None:
    """Write a pointer as a text file with a path, which unlike a symbolic link can be uploaded.

    Args:
        existing_path: Path that the pointer names.
        destination_filename: File to write, which must end in `.symlink` and not exist.

    Raises:
        ValueError: If `destination_filename` does not end in `.symlink`.
        FileExistsError: If the file exists.
    """
    name = os.fspath(destination_filename)
    if not name.endswith(SYMLINK_SUFFIX):
        raise ValueError(
            f"destination_filename={name!r} must end in {SYMLINK_SUFFIX!r}, so that it is known as a pointer."
        )
    with open(name, "x") as file:  # "x": fail if the file exists
        file.write(os.fspath(existing_path))


def extract_path_from_symlink(source_path: str | os.PathLike[str], object_store: Any = None) -> str:
    """Return the target of a pointer: a `.symlink` object of a store, or a local symbolic link.

    Raises:
        FileNotFoundError: If the pointer does not exist.
        CorruptCheckpointError: If the object is not a valid pointer.
    """
    if object_store is None:
        return os.readlink(source_path)
    return _read_remote_pointer(object_store, os.fspath(source_path))


def _resolve(store: Any, name: str) -> str:
    for _ in range(_MOST_LINKS):
        if not name.endswith(SYMLINK_SUFFIX):
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
    if ".." in target.split("/"):  # the text of a pointer is not trusted
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
    if not hasattr(store, "download_object"):  # a logger destination
        store.download_file(name, destination, overwrite, progress_bar)
        return
    download = retry(ObjectStoreTransientError, num_attempts=_ATTEMPTS)(store.download_object)
    with _bar(name, progress_bar) as bar:
        download(name, destination, overwrite=overwrite, callback=bar)


@retry(ObjectStoreTransientError, num_attempts=_ATTEMPTS)
def _fetch_from_web(url: str, destination: str, overwrite: bool, progress_bar: bool) -> None:
    refuse_existing(Path(destination), overwrite)
    done = 0
    try:
        with urllib.request.urlopen(url, timeout=_SILENCE_S) as answer, _bar(url, progress_bar) as bar:
            total = int(answer.headers.get("Content-Length", -1))  # -1 if the server does not send it
            with write_atomically(destination, overwrite=overwrite, need_bytes=max(total, 0)) as unfinished:
                with unfinished.open("wb") as file:
                    while chunk := answer.read(_CHUNK_BYTES):
                        done += file.write(chunk)
                        bar(done, max(total, done))
                if 0 <= total != done:  # a connection that closes early looks like the end of the file
                    raise ObjectStoreTransientError(f"{done} of the {total} bytes of {url} came. Download it again.")
    except (StorageError, FileExistsError):  # raised above; both are OSErrors
        raise
    except OSError as error:  # includes the errors of urllib
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        fault = classify(error)
        if fault is Fault.MISSING:
            raise FileNotFoundError(f"{url} does not exist: {error}. Check the address.") from error
        if fault is Fault.TRANSIENT:
            raise ObjectStoreTransientError(f"{url} could not be fetched: {error}. Try again.") from error
        raise StorageError(f"{url} could not be fetched: {error}. Check the address and its access rights.") from error


@contextmanager
def _bar(name: str, wanted: bool) -> Iterator[Progress]:
    """Yield a progress callback for stores, which draws a bar if it is wanted and tqdm is installed."""
    if not wanted or importlib.util.find_spec("tqdm") is None:
        if wanted:
            log.info("Downloading %s (the package tqdm would show a progress bar)", name)
        yield lambda done, total: None
        return
    with TqdmCallback(tqdm_kwargs={"desc": f"Downloading {name}", "unit": "B", "unit_scale": True}) as bar:

        def show(done: int, total: int) -> None:
            bar.set_size(total)
            bar.absolute_update(done)

        yield show


class CheckpointUploadCallback(Callback):
    """Callback that raises the errors of background uploads and waits for them when training ends.

    Args:
        remote_folder: An address such as `'s3://bucket/folder'`.
    """

    def __init__(self, remote_folder: str) -> None:
        self.remote_folder = remote_folder
        self.uploader = RemoteUploader(remote_folder)

    def batch_end(self, state: "State", logger: "Logger") -> None:
        """Raise the first error of the uploads that have finished."""
        self.uploader.check_workers()

    def fit_end(self, state: "State", logger: "Logger") -> None:
        """Wait for the uploads, and raise their first error."""
        self.uploader.wait()

    def post_close(self) -> None:
        """Wait for the uploads, then release threads and connections."""
        self.uploader.wait_and_close()


def download_monolithic_checkpoint(
    source_uri: str, destination_path: str, global_rank_zero_only: bool = True
) -> str | None:
    """Download a single-file checkpoint on rank 0, or on one rank of each node.

    The other ranks return at once: synchronize before they read the file.

    Args:
        source_uri: Address of the file, or of a `.symlink` that points to it.
        destination_path: Local file to write, or the folder for it.
        global_rank_zero_only: Whether only rank 0 downloads, instead of the first rank of each node.

    Returns:
        The local path on the ranks that downloaded; `None` on the others.

    Raises:
        FileNotFoundError: If the file does not exist.
        StorageError: If the fifth attempt fails too.
    """
    if get_local_rank() != 0 or (global_rank_zero_only and get_node_rank() != 0):
        return None
    if destination_path.endswith("/") or os.path.isdir(destination_path):
        name = posixpath.basename(parse_uri(source_uri).path).removesuffix(SYMLINK_SUFFIX)
        destination_path = os.path.join(destination_path, name)
    get_file(source_uri, destination_path, overwrite=True)
    return destination_path


def upload_file(
    dest_dir: str,
    source_path: str | None = None,
    symlink_granularity: Literal["file", "dir"] | None = None,
    symlink_name: str = "latest.symlink",
    async_upload: bool = True,
    state: "State | None" = None,
    overwrite: bool = False,
) -> None:
    """Upload this rank's file, then write a pointer to it once the store shows it.

    With `symlink_granularity='dir'`, every rank must call this.

    Args:
        dest_dir: Address of the remote folder. The file keeps its name.
        source_path: Local file; `None` on ranks without one.
        symlink_granularity: `'file'` for a pointer to this file; `'dir'` for one to the folder, once the files of all
            ranks have arrived; `None` for no pointer.
        symlink_name: Name of the pointer in the folder.
        async_upload: Whether to upload in the background. Errors are then raised at the end of a batch, and the end of
            training waits for the upload.
        state: Training state, required with `async_upload`. Its `CheckpointUploadCallback` for this bucket is used, or
            one is added.
        overwrite: Whether to replace an object of the same name.

    Raises:
        ValueError: If `symlink_granularity` has another value, or `async_upload` is set without `state`.
        FileExistsError: If the object exists and `overwrite` is false; with `async_upload`, later.
        StorageError: If the store refuses or fails; with `async_upload`, later.
    """
    if symlink_granularity not in (None, "file", "dir"):
        raise ValueError(f"Unrecognized symlink granularity: {symlink_granularity!r}. Use 'file', 'dir' or None.")
    if not symlink_name.endswith(SYMLINK_SUFFIX):
        raise ValueError(f"symlink_name={symlink_name!r} must end in {SYMLINK_SUFFIX!r}, so that it is followed.")
    uploader = _uploader_of(state, dest_dir) if async_upload else RemoteUploader(dest_dir)
    folder = parse_uri(dest_dir).path.strip("/")
    name = None if source_path is None else posixpath.join(folder, os.path.basename(source_path))
    if name is not None and source_path is not None:
        uploader.upload_file_async(name, source_path, overwrite)
    pointer = posixpath.join(folder, symlink_name)
    if symlink_granularity == "file" and name is not None:
        uploader.point_async(pointer, name, [name])
    elif symlink_granularity == "dir":
        # The pointer waits for the files of all ranks, so their names are gathered on every rank.
        from composer_dist import dist  # imports torch, which is slow

        names = [gathered for gathered in dist.all_gather_object(name) if gathered is not None]
        if get_global_rank() == 0:
            uploader.point_async(pointer, folder, names)
    if not async_upload:
        uploader.wait_and_close()


def _uploader_of(state: "State | None", dest_dir: str) -> RemoteUploader:
    if state is None:
        raise ValueError("state=None: an upload in the background needs the state, whose callbacks wait for it.")
    place = parse_uri(dest_dir)[:2]  # one uploader per bucket suffices, since object names include the folder
    for callback in state.callbacks:
        if isinstance(callback, CheckpointUploadCallback) and parse_uri(callback.remote_folder)[:2] == place:
            return callback.uploader
    callback = CheckpointUploadCallback(dest_dir)
    state.callbacks.append(callback)
    return callback.uploader
