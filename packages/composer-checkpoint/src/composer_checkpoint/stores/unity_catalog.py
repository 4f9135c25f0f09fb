"""Volumes of Databricks' Unity Catalog."""

import os
from pathlib import Path
from typing import Any

from composer_checkpoint.commit import refuse_existing, write_atomically
from composer_checkpoint.errors import StorageError
from composer_checkpoint.stores._faults import Fault, classify
from composer_checkpoint.stores.base import ObjectStore, ObjectStoreTransientError, Progress

__all__ = ["UCObjectStore"]

_CHUNK_BYTES = 8 << 20


class UCObjectStore(ObjectStore):
    """A volume of Unity Catalog, through Databricks' own client.

    Args:
        path: `Volumes/<catalog>/<schema>/<volume>`, with or without more behind it.
        client: A `databricks.sdk.WorkspaceClient`. One with the environment's credentials when `None`.

    Raises:
        ValueError: If the path is not of this form; the workspace is asked nothing before that is clear.
        ImportError: If the package `databricks-sdk` is not installed.
    """

    def __init__(self, path: str, client: Any = None) -> None:
        self.prefix = self.validate_path(path)
        if client is None:
            try:
                from databricks.sdk import WorkspaceClient  # pyright: ignore[reportMissingImports]  # not among the extras
            except ImportError as error:
                raise ImportError(
                    f"'dbfs:/{path.lstrip('/')}' needs the package 'databricks-sdk', which is not installed. Install "
                    f"it with: pip install databricks-sdk"
                ) from error
            client = WorkspaceClient()
        self.client = client

    @staticmethod
    def validate_path(path: str) -> str:
        """Return the volume's part of a path: its first four names.

        Raises:
            ValueError: If it has fewer, or does not begin with `Volumes`.
        """
        parts = path.strip("/").split("/")
        if parts[0] != "Volumes" or len(parts) < 4 or not all(parts[:4]) or ".." in parts:
            raise ValueError(
                f"path={path!r} is no path in a volume of Unity Catalog. Give one such as "
                f"'Volumes/<catalog>/<schema>/<volume>/checkpoints'."
            )
        return "/".join(parts[:4])

    def get_uri(self, object_name: str) -> str:
        """Return the address of an object, whether or not it exists."""
        return f"dbfs:{self._path(object_name)}"

    def upload_object(  # pyright: ignore[reportIncompatibleMethodOverride]  # there is nothing more to say
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        callback: Progress | None = None,
        *,
        overwrite: bool = True,
    ) -> None:
        """Copy a local file to the volume; as `ObjectStore.upload_object`, with `overwrite`."""
        path, size = self._path(object_name), os.path.getsize(filename)
        try:
            self.client.files.create_directory(os.path.dirname(path))
            with open(filename, "rb") as content:
                self.client.files.upload(path, content, overwrite=overwrite)
            stored = self.get_object_size(object_name)
        except Exception as error:
            raise self._explained(error, object_name) from error
        if stored != size:
            raise ObjectStoreTransientError(
                f"{self.get_uri(object_name)} holds {stored} of {size} bytes after an upload. Upload it again."
            )
        if callback is not None:
            callback(size, size)

    def get_object_size(self, object_name: str) -> int:
        """Return the size of an object in bytes, as the volume says now."""
        try:
            return int(self.client.files.get_metadata(self._path(object_name)).content_length)
        except Exception as error:
            raise self._explained(error, object_name) from error

    def download_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        overwrite: bool = False,
        callback: Progress | None = None,
    ) -> None:
        """Copy an object to a local file, which appears whole or not at all; as `ObjectStore.download_object`."""
        refuse_existing(Path(filename), overwrite)
        size, done = self.get_object_size(object_name), 0
        with write_atomically(filename, overwrite=overwrite, need_bytes=size) as unfinished:
            try:
                with (
                    self.client.files.download(self._path(object_name)).contents as content,
                    unfinished.open("wb") as file,
                ):
                    while chunk := content.read(_CHUNK_BYTES):
                        done += file.write(chunk)
                        if callback is not None:
                            callback(done, size)
            except Exception as error:
                raise self._explained(error, object_name) from error
            if done != size:
                raise ObjectStoreTransientError(
                    f"{done} of the {size} bytes of {self.get_uri(object_name)} came. Download it again."
                )

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """Return the names of all objects that begin with a text, in order, relative to the volume."""
        prefix = (prefix or "").lstrip("/").removeprefix(f"{self.prefix}/")
        names: list[str] = []
        pending = [f"/{self.prefix}/{os.path.dirname(prefix)}".rstrip("/")]
        while pending:
            try:
                entries = list(self.client.files.list_directory_contents(pending.pop()))
            except Exception as error:
                if classify(error) is Fault.MISSING:
                    continue
                raise self._explained(error, prefix) from error
            pending += [entry.path for entry in entries if entry.is_directory]
            names += [entry.path.removeprefix(f"/{self.prefix}/") for entry in entries if not entry.is_directory]
        return sorted(name for name in names if name.startswith(prefix))

    def delete_object(self, object_name: str) -> None:
        """Delete an object. There need not be one of this name."""
        try:
            self.client.files.delete(self._path(object_name))
        except Exception as error:
            if classify(error) is not Fault.MISSING:
                raise self._explained(error, object_name, asks=False) from error

    def _path(self, object_name: str) -> str:
        name = object_name.lstrip("/").removeprefix(f"{self.prefix}/")
        if ".." in name.split("/"):
            raise ValueError(f"object_name={object_name!r} leads out of /{self.prefix}. Use a path without '..'.")
        return f"/{self.prefix}/{name}"

    def _explained(self, error: Exception, object_name: str, *, asks: bool = True) -> Exception:
        match classify(error):
            case Fault.MISSING | Fault.FORBIDDEN if asks:
                return FileNotFoundError(f"{self.get_uri(object_name)} does not exist, or must not be seen: {error}")
            case Fault.EXISTS:
                return FileExistsError(f"Object {self.get_uri(object_name)} already exists: {error}")
            case Fault.TRANSIENT:
                return ObjectStoreTransientError(f"{self.get_uri(object_name)} could not be reached: {error}")
            case Fault.FORBIDDEN:
                return StorageError(f"{self.get_uri(object_name)} must not be deleted: {error}. Look at the grants.")
        return error
