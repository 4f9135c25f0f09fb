"""Copies of committed checkpoints, in the store of a remote folder or with loggers that take files."""

import os
import posixpath
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING

from composer_checkpoint.fetching import create_symlink_file
from composer_checkpoint.publish import SYMLINK_SUFFIX, write_pointer
from composer_checkpoint.stores.addresses import is_uri
from composer_checkpoint.upload import RemoteUploader

if TYPE_CHECKING:
    from composer_events import Logger, State

__all__ = ["CheckpointUploads"]


class CheckpointUploads:
    """Sends checkpoints in the background where there is a remote folder, and hands them to loggers otherwise.

    Args:
        uploader: Of the remote folder, if there is one.
        overwrite: Whether a whole checkpoint of the same name may be replaced.
        timeout_s: How long `wait` waits.

    Attributes:
        overwrite: As above.
    """

    def __init__(self, uploader: RemoteUploader | None, overwrite: bool, timeout_s: float) -> None:
        self._uploader = uploader
        self.overwrite = overwrite
        self._timeout_s = timeout_s

    def send(
        self, path: str, name: str | None, pointer: str | None, state: "State", logger: "Logger"
    ) -> Future[None] | None:
        """Begin to copy a checkpoint, and then let a pointer name it.

        Args:
            path: The file or folder; an address if it was written to the store at once.
            name: What it is called there. `None` copies nothing.
            pointer: What the pointer is called, without its suffix.
            state: The training state.
            logger: Has the destinations that take files.

        Returns:
            What is under way, during which the file must stay.
        """
        if name is None:
            return None
        if self._uploader is None:
            self._hand_to_loggers(path, name, pointer, state, logger)
            return None
        if not is_uri(path):
            return self._uploader.publish_async(path, name, pointer=pointer, overwrite=self.overwrite)
        if pointer is not None:
            write_pointer(self._uploader.remote_backend, pointer + SYMLINK_SUFFIX, name)
        return None

    def check(self) -> None:
        """Raise the first error of those that have ended."""
        if self._uploader is not None:
            self._uploader.check_workers()

    def wait(self) -> None:
        """Return when nothing is under way.

        Raises:
            RuntimeError: If that takes too long.
        """
        if self._uploader is None:
            return
        late = wait(self._uploader.futures, timeout=self._timeout_s).not_done
        if late:
            raise RuntimeError(
                f"{len(late)} uploads to {self._uploader.remote_folder} have not ended within "
                f"upload_timeout_in_seconds={self._timeout_s!r}. Look at the connection, or allow for more time."
            )
        self._uploader.wait()

    def close(self) -> None:
        """Wait, and let go of connections."""
        if self._uploader is not None:
            self._uploader.wait_and_close()

    def _hand_to_loggers(self, path: str, name: str, pointer: str | None, state: "State", logger: "Logger") -> None:
        destinations = getattr(logger, "destinations", ())
        if not any(destination.can_upload_files() for destination in destinations):
            return
        for file, remote_name in _files(path, name):
            logger.upload_file(remote_name, file, overwrite=self.overwrite)
        if pointer is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            link = os.path.join(folder, "latest" + SYMLINK_SUFFIX)
            create_symlink_file(name, link)
            logger.upload_file(pointer + SYMLINK_SUFFIX, link, overwrite=True)


def _files(path: str, name: str) -> Iterator[tuple[Path, str]]:
    if not os.path.isdir(path):
        yield Path(path), name
        return
    for file in sorted(Path(path).rglob("*")):
        if file.is_file():
            yield file, posixpath.join(name, file.relative_to(path).as_posix())
