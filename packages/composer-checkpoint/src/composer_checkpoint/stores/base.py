"""What is asked of a remote store."""

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Self

from composer_checkpoint.errors import StorageError

__all__ = ["ObjectStore", "ObjectStoreTransientError", "Progress"]

Progress = Callable[[int, int], None]
"""Called with the bytes so far, which never get fewer, and all of them."""


class ObjectStoreTransientError(StorageError, RuntimeError):
    """A store failed in a way that may have passed by the next attempt; the cause is the store's own error."""


class ObjectStore:
    """Files under names in a remote place.

    A name is a path with forward slashes. A store may leave out what it cannot do; the method then raises
    `NotImplementedError`. Use it as a context manager, or call `close`.
    """

    def get_uri(self, object_name: str) -> str:
        """Return the address of an object, whether or not it exists."""
        self._cannot("say the address of an object")

    def upload_object(
        self, object_name: str, filename: str | os.PathLike[str], callback: Progress | None = None, **kwargs: Any
    ) -> None:
        """Copy a local file to the store.

        Args:
            object_name: The name it gets. An object that has it is replaced.
            filename: The file.
            callback: Called with the bytes sent and the file's size.
            **kwargs: What the store takes besides; `FsspecObjectStore` takes `overwrite`.

        Raises:
            ObjectStoreTransientError: If it may work the next time.
            StorageError: If the store refuses.
        """
        self._cannot("upload")

    def get_object_size(self, object_name: str) -> int:
        """Return the size of an object in bytes, as the store says now.

        Raises:
            FileNotFoundError: If it does not exist, or must not be seen.
            ObjectStoreTransientError: If it may work the next time.
        """
        self._cannot("say the size of an object")

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
            ObjectStoreTransientError: If it may work the next time.
        """
        self._cannot("download")

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """Return the names of all objects that begin with a text, in order.

        The list may be out of date. Whether one object exists is asked with `get_object_size`.
        """
        self._cannot("list objects")

    def delete_object(self, object_name: str) -> None:
        """Delete an object. There need not be one of this name: an attempt that failed may have deleted it.

        Args:
            object_name: The object. A folder is none.

        Raises:
            ObjectStoreTransientError: If it may work the next time.
            StorageError: If the store refuses.
        """
        self._cannot("delete")

    def close(self) -> None:
        """Let go of connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _cannot(self, what: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} cannot {what}. Use a store that can, such as S3ObjectStore.")
