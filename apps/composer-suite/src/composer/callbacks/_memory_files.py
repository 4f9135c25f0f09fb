"""The files in which a run keeps what its allocator did, and where they are uploaded to."""

from __future__ import annotations

import logging
import os
import posixpath
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from composer_checkpoint.remote.logger import (
    RemoteUploaderDownloader,
    maybe_create_remote_uploader_downloader_from_uri,
)
from composer_checkpoint.save_folder import ensure_folder_is_empty
from composer_checkpoint.stores.base import parse_uri
from composer_events.arguments import check_flags, check_places, check_texts
from composer_events.formatting import OF_TIME, check_placeholders, format_name_with_dist_and_time

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["MemoryFiles", "has_cuda_memory"]

_log = logging.getLogger(__name__)


def has_cuda_memory(state: State, what: str) -> bool:
    """Answer whether the model is where CUDA's allocator is, and warn if not."""
    parameter = next(state.model.parameters(), None)
    where = "no device" if parameter is None else parameter.device.type
    if where == "cuda" or (where == "meta" and torch.cuda.is_available()):
        return True
    warnings.warn(f"The {what} only works on CUDA devices, but the model is on {where}.", UserWarning, stacklevel=3)
    return False


class MemoryFiles:
    """A folder for a run's files, and a name for them where loggers keep files.

    Args:
        folder: May use `{run_name}` and the ranks' placeholders.
        remote_file_name: The folder in the store, or an address whose store is then uploaded to. `None` uploads
            nothing.
        overwrite: Whether there may be files in the folder, and files of these names in the store.

    Raises:
        TypeError: If an argument is of another kind.
    """

    def __init__(self, folder: str, remote_file_name: str | None, overwrite: bool) -> None:
        check_places(folder=folder)
        check_texts(remote_file_name=remote_file_name, may_be_none=True)
        check_placeholders(OF_TIME, folder=folder, remote_file_name=remote_file_name)
        check_flags(overwrite=overwrite)
        self.folder = folder
        self.remote_file_name = remote_file_name
        self.overwrite = overwrite
        self._uploaded: set[str] = set()

    def prepare(self, state: State, logger: Logger) -> None:
        """Make the folder, and see to it that an address is uploaded to. Every rank must call this.

        Raises:
            FileExistsError: If there are files in the folder that may not be replaced.
        """
        folder = self._formatted(self.folder, state)
        os.makedirs(folder, exist_ok=True)
        if not self.overwrite:
            ensure_folder_is_empty(folder)
        if self.remote_file_name is not None:
            _add_uploader(self.remote_file_name, state, logger)

    def path(self, filename: str, state: State) -> str:
        """Return where a file belongs now."""
        return os.path.join(self._formatted(self.folder, state), self._formatted(filename, state))

    def keep(self, files: Mapping[str, Callable[[], bytes]], state: State, logger: Logger) -> None:
        """Write and upload files, each for itself: training goes on without those that fail, which are logged.

        Args:
            files: By path, what makes their contents.
            state: The state.
            logger: The logger.
        """
        for path, make in files.items():
            try:
                Path(path).write_bytes(make())
                if self.remote_file_name is not None:
                    remote_folder = parse_uri(self._formatted(self.remote_file_name, state)).path
                    remote_name = posixpath.join(remote_folder.lstrip("/"), os.path.basename(path))
                    is_own = remote_name in self._uploaded  # where memory runs out again, the newer one counts
                    logger.upload_file(remote_name, path, overwrite=self.overwrite or is_own)
                    self._uploaded.add(remote_name)
            except Exception:  # it watches training, and must not end it
                _log.exception("%s could not be written or uploaded; the other files are.", path)

    def _formatted(self, name: str, state: State) -> str:
        return format_name_with_dist_and_time(name, state.run_name, state.timestamp)


def _add_uploader(address: str, state: State, logger: Logger) -> None:
    """Upload to the store of an address, unless a logger does."""
    backend, bucket, _ = parse_uri(address)
    places = logger.destinations
    if any(isinstance(place, RemoteUploaderDownloader) and place.serves(backend, bucket) for place in places):
        return
    uploader = maybe_create_remote_uploader_downloader_from_uri(address, [])
    if uploader is not None:
        logger.destinations = (*places, uploader)
        state.callbacks.append(uploader)
        uploader.init(state, logger)  # the loggers had their turn before the callbacks
