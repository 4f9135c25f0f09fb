"""Base class of object stores that verify their transfers, and the store for any fsspec file system."""

import importlib.util
import inspect
import logging
import os
import posixpath
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from fsspec.callbacks import Callback
from fsspec.core import url_to_fs

from composer_checkpoint.commit import refuse_existing, write_atomically
from composer_checkpoint.errors import CheckpointError, StorageError
from composer_checkpoint.stores.base import Fault, ObjectStore, ObjectStoreTransientError, Progress, classify

log = logging.getLogger(__name__)

# The package that fsspec imports for a protocol, and the extra that installs it.
_EXTRAS: Final = {
    "s3": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "az": ("adlfs", "azure"),
    "abfs": ("adlfs", "azure"),
    "abfss": ("adlfs", "azure"),
    "oci": ("ocifs", "oci"),
    "sftp": ("paramiko", "sftp"),
    "ssh": ("paramiko", "sftp"),
    "hf": ("huggingface_hub", "hf"),
}
# File systems with real folders, where a file is visible while it is written. Uploads there need a temporary name.
_FOLDERS: Final = {"file", "local", "sftp", "ssh", "smb", "hdfs", "arrow_hdfs"}
_ASKS: Final = {"look up", "download", "list"}  # actions for which a missing object is an ordinary outcome
# File systems whose `find` has the argument `prefix`, so that the server does the filtering.
_LISTS_BY_PREFIX: Final = {"s3", "s3a", "gs", "gcs"}


class VerifiedObjectStore(ObjectStore):
    """Store that verifies transfers by size and converts the errors of its client library to those of this package.

    Subclasses implement `_path`, which converts an object's name, and `_put`, `_get`, `_size` and `_remove`, which take
    its result. Apart from the client library's own retries, nothing is retried: callers may retry after
    `ObjectStoreTransientError`.
    """

    _path: Callable[[str], str]
    _put: Callable[..., None]
    _get: Callable[[str, Path, "_Progress"], None]
    _size: Callable[[str], int]
    _remove: Callable[[str], None]

    def upload_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        callback: Progress | None = None,
        *,
        overwrite: bool = True,
        **kwargs: Any,
    ) -> None:
        """Copy a local file to the store.

        Args:
            object_name: Name of the object.
            filename: Local file.
            callback: Called with the bytes sent and the file's size.
            overwrite: Whether to replace an object of the same name. If not, and the store supports conditional writes
                (S3), two writers cannot both succeed.
            **kwargs: For `FsspecObjectStore`, passed to the file system's `put_file`.

        Raises:
            FileExistsError: If the object exists and `overwrite` is false.
            ObjectStoreTransientError: If a retry may succeed, also if the stored size differs from the file's.
            StorageError: If the store refuses.
        """
        path, size = self._path(object_name), os.path.getsize(filename)
        progress = _Progress(callback, size)
        # Before the transfer, and also for stores without conditional writes, where two writers may still race.
        if not overwrite:
            with suppress(FileNotFoundError):
                self.get_object_size(object_name)
                raise _exists(self.get_uri(object_name))
        with self._explained(object_name, "upload"):
            self._put(os.fspath(filename), path, progress, overwrite=overwrite, **kwargs)
        try:
            stored = self.get_object_size(object_name)
        except FileNotFoundError:
            stored = None
        if stored != size:
            found = "cannot be seen" if stored is None else f"holds {stored} bytes"
            raise ObjectStoreTransientError(
                f"{self.get_uri(object_name)} {found} after an upload of the {size} bytes of {filename}. Upload it "
                f"again."
            )
        progress.finish()

    def get_object_size(self, object_name: str) -> int:
        """Return the current size of an object in bytes, as in `ObjectStore.get_object_size`."""
        path = self._path(object_name)
        with self._explained(object_name, "look up"):
            return self._size(path)

    def download_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        overwrite: bool = False,
        callback: Progress | None = None,
    ) -> None:
        """Copy an object to a local file atomically, as in `ObjectStore.download_object`."""
        refuse_existing(Path(filename), overwrite)  # before any request to the store
        size = self.get_object_size(object_name)
        progress = _Progress(callback, size)
        with write_atomically(filename, overwrite=overwrite, need_bytes=size) as unfinished:
            with self._explained(object_name, "download"):
                self._get(self._path(object_name), unfinished, progress)
            received = unfinished.stat().st_size
            if received != size:
                raise ObjectStoreTransientError(
                    f"{received} of the {size} bytes of {self.get_uri(object_name)} came. Download it again."
                )
        progress.finish()

    def delete_object(self, object_name: str) -> None:
        """Delete an object, or do nothing if it does not exist."""
        path = self._path(object_name)
        with self._explained(object_name, "delete"):
            try:
                self._remove(path)
            except Exception as error:
                if classify(error) is not Fault.MISSING:  # an earlier attempt that failed may have deleted it
                    raise

    @contextmanager
    def _explained(self, object_name: str, action: str) -> Iterator[None]:
        """Convert the errors of any client library to those of this package, keeping the cause."""
        try:
            yield
        except (CheckpointError, ValueError, TypeError, NotImplementedError, ImportError):
            raise  # converted already, or an error of the caller instead of the store
        except Exception as error:
            raise self._explain(error, object_name, action) from error

    def _explain(self, error: Exception, object_name: str, action: str) -> Exception:
        uri, fault = self.get_uri(object_name), classify(error)
        match fault:
            case Fault.EXISTS:
                return _exists(uri)
            case Fault.MISSING if action in _ASKS:
                return FileNotFoundError(f"{uri} does not exist: {_reason(error)}. Check the name and the folder.")
            case Fault.FORBIDDEN if action in _ASKS:
                # Without permission to list, stores such as S3 report missing objects as forbidden.
                return FileNotFoundError(
                    f"{uri} does not exist, or these credentials may not see it: {_reason(error)}. Check both."
                )
            case Fault.TRANSIENT:
                return ObjectStoreTransientError(f"could not {action} {uri}: {_reason(error)}. Try again.")
        return StorageError(
            f"could not {action} {uri}: {_reason(error)}. Check that the bucket or folder exists, that these "
            f"credentials may write to it, and that this machine has a network."
        )


class FsspecObjectStore(VerifiedObjectStore):
    """Store at any fsspec address: `s3://`, `gs://`, `az://`, `oci://`, `sftp://`, `hf://`, `memory://`...

    Objects appear atomically, and their size is checked after each upload. Apart from the client library's own retries,
    nothing is retried: callers may retry after `ObjectStoreTransientError`.

    Args:
        uri: Address that names are relative to, such as `'s3://bucket/runs'`.
        **storage_options: Arguments of the file system's class, such as `endpoint_url` or `token`.

    Raises:
        ImportError: If the required package is not installed, with the command that installs it.
        ValueError: If fsspec does not know this kind of address.

    Example:
        >>> store = FsspecObjectStore("memory://bucket/runs")
        >>> store.get_uri("ep1.pt")
        'memory://bucket/runs/ep1.pt'
    """

    def __init__(self, uri: str, **storage_options: Any) -> None:
        self.uri = uri if uri.endswith((":///", "://")) else uri.rstrip("/")
        self.filesystem: Any  # fsspec and its implementations are not typed
        self.filesystem, self._root = self._open(uri, storage_options)
        protocols = self.filesystem.protocol
        self._protocols = {protocols} if isinstance(protocols, str) else set(protocols)

    def _open(self, uri: str, storage_options: dict[str, Any]) -> tuple[Any, str]:
        """Return the file system, and its path that names are relative to."""
        require_package(uri)
        # A new instance, since fsspec shares instances, and clearing the cache would affect the user's file systems.
        try:
            return url_to_fs(uri, skip_instance_cache=True, **storage_options)
        except ValueError as error:
            if "connection_string" not in str(error):  # the message of adlfs
                raise
            raise ValueError(
                f"{uri} needs credentials. Set AZURE_STORAGE_CONNECTION_STRING, or "
                f"AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY."
            ) from error

    def get_uri(self, object_name: str) -> str:
        """Return the address of an object, whether or not it exists."""
        return f"{self.uri}{'' if self.uri.endswith('/') else '/'}{object_name.lstrip('/')}"

    def get_key(self, object_name: str) -> str:
        """Return the name of an object in its bucket, including the prefix of this store."""
        return posixpath.join(getattr(self, "prefix", ""), object_name.lstrip("/"))

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """Return the sorted names of all objects with a prefix.

        The list may be outdated. Use `get_object_size` to check that an object exists.
        """
        prefix = (prefix or "").lstrip("/")
        with self._explained(prefix, "list"):
            self.filesystem.invalidate_cache()  # other processes may have changed the store since the last listing
            if self._protocols & _LISTS_BY_PREFIX:  # others can list whole folders only
                found = self.filesystem.find(self._root, prefix=prefix)
            else:
                folder = posixpath.dirname(prefix)
                path = self._path(folder) if folder else self._root
                found = self.filesystem.find(path) if self.filesystem.isdir(path) else []
        start = _normalized(self._root)
        names = (_normalized(path).removeprefix(start).lstrip("/") for path in found)
        return sorted(name for name in names if name.startswith(prefix))

    def filesystem_path(self, object_name: str) -> str:
        """Return the path of an object in `filesystem`, for partial reads and writes."""
        return self._path(object_name)

    def _path(self, object_name: str) -> str:
        name = object_name.lstrip("/")
        if not name or ".." in name.split("/"):
            raise ValueError(
                f"object_name={object_name!r} is not a name below {self.uri}. Use a path with forward slashes and "
                f"without '..'."
            )
        return f"{self._root.rstrip('/')}/{name}"

    def _put(self, filename: str, path: str, progress: "_Progress", *, overwrite: bool, **kwargs: Any) -> None:
        # The synchronous `put_file` of asynchronous file systems hides the parameters.
        parameters = inspect.signature(getattr(self.filesystem, "_put_file", self.filesystem.put_file)).parameters
        if "overwrite" in parameters:  # Azure's
            kwargs = {"overwrite": overwrite, **kwargs}
        elif "mode" in parameters and not overwrite:
            kwargs = {"mode": "create", **kwargs}
        if not self._protocols & _FOLDERS:
            self.filesystem.put_file(filename, path, callback=progress, **kwargs)
            return
        self.filesystem.makedirs(posixpath.dirname(path), exist_ok=True)
        unfinished = f"{path}.{secrets.token_hex(4)}.tmp"
        try:
            self.filesystem.put_file(filename, unfinished, callback=progress, **kwargs)
            self.filesystem.mv(unfinished, path)
        except BaseException:  # also an interrupt must not leave a temporary file
            with suppress(Exception):
                self.filesystem.rm_file(unfinished)
            raise

    def _get(self, path: str, target: Path, progress: "_Progress") -> None:
        self.filesystem.get_file(path, str(target), callback=progress)

    def _size(self, path: str) -> int:
        self.filesystem.invalidate_cache()  # an earlier listing may be outdated
        info = self.filesystem.info(path)
        if info["type"] == "directory":  # a mere prefix of other objects' names
            raise FileNotFoundError(f"{path} is a folder")
        return int(info["size"])

    def _remove(self, path: str) -> None:
        self.filesystem.rm_file(path)


class _Progress(Callback):
    """fsspec callback that reports the transferred bytes, which never decrease, and the total at the end."""

    def __init__(self, callback: Progress | None, size: int) -> None:
        super().__init__(size=size)
        self._callback, self._size, self._told = callback, size, -1

    def call(self, hook_name: str | None = None, **kwargs: Any) -> None:
        self._tell(min(self.value, self._size))

    def branched(self, path_1: str, path_2: str, **kwargs: Any) -> Callback:
        return self

    def finish(self) -> None:
        self._tell(self._size)

    def set_size(self, size: int) -> None:
        """Ignore the size, since some libraries report a wrong one at first."""

    def _tell(self, value: int) -> None:
        if self._callback is not None and value > self._told:
            self._told = value
            self._callback(value, self._size)


def require_package(uri: str) -> None:
    """Raise if the package that an address requires is not installed."""
    package, extra = _EXTRAS.get(uri.partition("://")[0].lower(), ("", ""))
    if package and importlib.util.find_spec(package) is None:
        raise ImportError(
            f"{uri!r} needs the package {package!r}, which is not installed. Install it with: "
            f"pip install 'composer-checkpoint[{extra}]'"
        )


def _exists(uri: str) -> FileExistsError:
    return FileExistsError(
        f"Object {uri} already exists, but overwrite was set to False. Choose another name, or pass overwrite=True."
    )


def _normalized(path: str) -> str:
    return posixpath.normpath(path or ".").strip("/").removeprefix(".")


def _reason(error: BaseException) -> str:
    # The deepest cause is the response of the server, without the client library's wrapping.
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
