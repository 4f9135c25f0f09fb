"""Any place that fsspec can write to, as a store."""

import importlib.util
import inspect
import logging
import os
import posixpath
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from fsspec.callbacks import Callback
from fsspec.core import url_to_fs

from composer_checkpoint.commit import refuse_existing, write_atomically
from composer_checkpoint.errors import CheckpointError, StorageError
from composer_checkpoint.stores.base import Fault, ObjectStore, ObjectStoreTransientError, Progress, classify

__all__ = ["FsspecObjectStore", "require_package"]

log = logging.getLogger(__name__)

# By protocol: the package that fsspec loads for it, and our extra that brings it.
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
# Folders in the ordinary sense: a file is there from its first byte on, so that it is sent under another name.
_FOLDERS: Final = {"file", "local", "sftp", "ssh", "smb", "hdfs", "arrow_hdfs"}
_ASKS: Final = {"look up", "download", "list"}  # what "not found" is an answer to
_LISTS_BY_PREFIX: Final = {"s3", "s3a", "gs", "gcs"}


class FsspecObjectStore(ObjectStore):
    """A store at any address that fsspec knows: `s3://`, `gs://`, `az://`, `oci://`, `sftp://`, `hf://`, `memory://`...

    An object appears whole or not at all, and the store is asked for its size after each upload. Nothing is retried
    here beyond what the client library does by itself: that is up to the caller, who sees `ObjectStoreTransientError`.

    Args:
        uri: Where the names begin, such as `'s3://bucket/runs'`.
        **storage_options: What the file system's class takes, such as `endpoint_url` or `token`.

    Raises:
        ImportError: If the package for this kind of address is not installed, with the line that installs it.
        ValueError: If fsspec does not know this kind of address.

    Example:
        >>> store = FsspecObjectStore("memory://bucket/runs")
        >>> store.get_uri("ep1.pt")
        'memory://bucket/runs/ep1.pt'
    """

    def __init__(self, uri: str, **storage_options: Any) -> None:
        self.uri = uri if uri.endswith((":///", "://")) else uri.rstrip("/")
        self.filesystem: Any  # fsspec and what it loads tell no types
        self.filesystem, self._root = self._open(uri, storage_options)
        protocols = self.filesystem.protocol
        self._protocols = {protocols} if isinstance(protocols, str) else set(protocols)

    def _open(self, uri: str, storage_options: dict[str, Any]) -> tuple[Any, str]:
        """Return the file system, and the path in it at which names begin."""
        require_package(uri)
        # Not shared with the user's own file systems, whose caches would be emptied.
        return url_to_fs(uri, skip_instance_cache=True, **storage_options)

    def get_uri(self, object_name: str) -> str:
        """Return the address of an object, whether or not it exists."""
        return f"{self.uri}{'' if self.uri.endswith('/') else '/'}{object_name.lstrip('/')}"

    def get_key(self, object_name: str) -> str:
        """Return the name that an object has in its bucket, where this store may begin with a prefix."""
        return posixpath.join(getattr(self, "prefix", ""), object_name.lstrip("/"))

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
            object_name: The name it gets.
            filename: The file.
            callback: Called with the bytes sent and the file's size.
            overwrite: Whether an object that has the name is replaced. Where the store can create an object on the
                condition that there is none (S3), two writers cannot both succeed.
            **kwargs: Passed to the file system's `put_file`.

        Raises:
            FileExistsError: If the object exists and `overwrite` is false.
            ObjectStoreTransientError: If it may work the next time, also if the store holds fewer bytes than it got.
            StorageError: If the store refuses.
        """
        path, size = self._path(object_name), os.path.getsize(filename)
        progress = _Progress(callback, size)
        if not overwrite:
            self._refuse_existing(object_name)
        with self._explained(object_name, "upload"):
            self._put(os.fspath(filename), path, progress, {**_overwriting(self.filesystem, overwrite), **kwargs})
        stored = self._size_after_upload(object_name)
        if stored != size:
            raise ObjectStoreTransientError(
                f"{self.get_uri(object_name)} holds {stored} bytes after an upload of the {size} bytes of {filename}. "
                f"Upload it again."
            )
        progress.finish()

    def get_object_size(self, object_name: str) -> int:
        """Return the size of an object in bytes, as the store says now.

        Raises:
            FileNotFoundError: If it does not exist, or must not be seen.
            ObjectStoreTransientError: If it may work the next time.
        """
        with self._explained(object_name, "look up"):
            self.filesystem.invalidate_cache()  # what an earlier listing said may be out of date
            info = self.filesystem.info(self._path(object_name))
            if info["type"] == "directory":
                raise FileNotFoundError(f"{self.get_uri(object_name)} is a folder")
            return int(info["size"])

    def download_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        overwrite: bool = False,
        callback: Progress | None = None,
    ) -> None:
        """Copy an object to a local file, which appears whole or not at all.

        Args:
            object_name: The object.
            filename: The file it becomes. Folders above it are made.
            overwrite: Whether a file that exists is replaced.
            callback: Called with the bytes received and the object's size.

        Raises:
            FileNotFoundError: If the object does not exist, or must not be seen.
            FileExistsError: If the file exists and `overwrite` is false.
            ObjectStoreTransientError: If it may work the next time, also if fewer bytes came than the store holds.
            StorageError: If the store refuses, or the local disk cannot take the file.
        """
        refuse_existing(Path(filename), overwrite)
        size = self.get_object_size(object_name)
        progress = _Progress(callback, size)
        with write_atomically(filename, overwrite=overwrite, need_bytes=size) as unfinished:
            with self._explained(object_name, "download"):
                self.filesystem.get_file(self._path(object_name), str(unfinished), callback=progress)
            received = unfinished.stat().st_size
            if received != size:
                raise ObjectStoreTransientError(
                    f"{received} of the {size} bytes of {self.get_uri(object_name)} came. Download it again."
                )
        progress.finish()

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """Return the names of all objects that begin with a text, in order.

        The list may be out of date. Whether one object exists is asked with `get_object_size`.
        """
        prefix = (prefix or "").lstrip("/")
        with self._explained(prefix, "list"):
            self.filesystem.invalidate_cache()
            if self._protocols & _LISTS_BY_PREFIX:
                found = self.filesystem.find(self._root, prefix=prefix)
            else:
                found = self._find_below(posixpath.dirname(prefix))
        start = _normalized(self._root)
        names = (_normalized(path).removeprefix(start).lstrip("/") for path in found)
        return sorted(name for name in names if name.startswith(prefix))

    def delete_object(self, object_name: str) -> None:
        """Delete an object. There need not be one of this name.

        Raises:
            ObjectStoreTransientError: If it may work the next time.
            StorageError: If the store refuses.
        """
        path = self._path(object_name)
        with self._explained(object_name, "delete"):
            try:
                self.filesystem.rm_file(path)
            except Exception as error:
                if classify(error) is not Fault.MISSING:
                    raise
            self.filesystem.invalidate_cache()

    def filesystem_path(self, object_name: str) -> str:
        """Return what `filesystem` calls an object, for those who read or write it piece by piece."""
        return self._path(object_name)

    def _find_below(self, folder: str) -> list[str]:
        path = self._path(folder) if folder else self._root
        try:
            return self.filesystem.find(path) if self.filesystem.isdir(path) else []
        except FileNotFoundError:
            return []

    def _path(self, object_name: str) -> str:
        """Return the file system's path, which stays below the root."""
        name = object_name.lstrip("/")
        if not name or ".." in name.split("/"):
            raise ValueError(
                f"object_name={object_name!r} is no name below {self.uri}. Use a path with forward slashes and "
                f"without '..'."
            )
        return f"{self._root.rstrip('/')}/{name}"

    def _put(self, filename: str, path: str, progress: "_Progress", kwargs: dict[str, Any]) -> None:
        if not self._protocols & _FOLDERS:
            self.filesystem.put_file(filename, path, callback=progress, **kwargs)
            return
        self.filesystem.makedirs(posixpath.dirname(path), exist_ok=True)
        unfinished = f"{path}.{secrets.token_hex(4)}.tmp"
        try:
            self.filesystem.put_file(filename, unfinished, callback=progress, **kwargs)
            self.filesystem.mv(unfinished, path)
        except BaseException:
            with suppress(Exception):
                self.filesystem.rm_file(unfinished)
            raise

    def _refuse_existing(self, object_name: str) -> None:
        try:
            self.get_object_size(object_name)
        except FileNotFoundError:
            return
        raise _exists(self.get_uri(object_name))

    def _size_after_upload(self, object_name: str) -> int:
        try:
            return self.get_object_size(object_name)
        except FileNotFoundError as error:
            raise ObjectStoreTransientError(
                f"{self.get_uri(object_name)} cannot be seen after it was uploaded. Upload it again."
            ) from error

    @contextmanager
    def _explained(self, object_name: str, action: str) -> Iterator[None]:
        """Turn what any client library raises into this package's errors, the cause kept."""
        try:
            yield
        except CheckpointError:
            raise
        except (ValueError, TypeError, NotImplementedError, ImportError):
            raise  # a slip of the caller's, not the store's
        except Exception as error:
            raise self._explain(error, object_name, action) from error

    def _explain(self, error: Exception, object_name: str, action: str) -> Exception:
        uri, fault = self.get_uri(object_name), classify(error)
        match fault:
            case Fault.EXISTS:
                return _exists(uri)
            case Fault.MISSING if action in _ASKS:
                return FileNotFoundError(f"{uri} does not exist: {_reason(error)}. Look at the name and the folder.")
            case Fault.FORBIDDEN if action in _ASKS:
                # Stores answer so also for what does not exist, to those who may not list.
                return FileNotFoundError(
                    f"{uri} does not exist, or these credentials may not see it: {_reason(error)}. Look at both."
                )
            case Fault.TRANSIENT:
                return ObjectStoreTransientError(f"could not {action} {uri}: {_reason(error)}. Try again.")
        return StorageError(
            f"could not {action} {uri}: {_reason(error)}. Check that the bucket or folder exists, that these "
            f"credentials may write to it, and that this machine has a network."
        )


class _Progress(Callback):
    """Tell a caller of the bytes so far, never fewer than before, and at the end all."""

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
        """Keep the size that was asked for: some libraries say another one at first."""

    def _tell(self, value: int) -> None:
        if self._callback is not None and value > self._told:
            self._told = value
            self._callback(value, self._size)


def require_package(uri: str) -> None:
    """Raise if the package for this kind of address is not installed.

    Raises:
        ImportError: With the line that installs it.
    """
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


def _overwriting(filesystem: Any, overwrite: bool) -> dict[str, Any]:
    """Return how a file system is told whether to replace an object, where it can be told."""
    method = getattr(filesystem, "_put_file", filesystem.put_file)
    parameters = inspect.signature(method).parameters
    if "overwrite" in parameters:  # Azure's
        return {"overwrite": overwrite}
    return {"mode": "create"} if "mode" in parameters and not overwrite else {}


def _reason(error: BaseException) -> str:
    """Return the last cause's own words, since libraries often say less."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
