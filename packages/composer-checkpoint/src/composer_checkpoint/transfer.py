"""Single files to and from a store, for a training loop of several ranks."""

import os
import posixpath
from typing import TYPE_CHECKING, Literal

from composer_checkpoint.fetching import get_file
from composer_checkpoint.publish import SYMLINK_SUFFIX
from composer_checkpoint.stores.addresses import parse_uri
from composer_checkpoint.upload import RemoteUploader
from composer_dist.env import get_global_rank, get_local_rank, get_node_rank
from composer_events.callback import Callback

if TYPE_CHECKING:
    from composer_events import Logger, State

__all__ = ["CheckpointUploadCallback", "download_monolithic_checkpoint", "upload_file"]


class CheckpointUploadCallback(Callback):
    """Raise the errors of uploads that run in the background, and wait for them when training ends.

    Args:
        remote_folder: An address such as `'s3://bucket/folder'`.
    """

    def __init__(self, remote_folder: str) -> None:
        self.remote_folder = remote_folder
        self.uploader = RemoteUploader(remote_folder)

    def batch_end(self, state: "State", logger: "Logger") -> None:
        """Raise the first error."""
        self.uploader.check_workers()

    def fit_end(self, state: "State", logger: "Logger") -> None:
        """Wait for what is under way."""
        self.uploader.wait()

    def post_close(self) -> None:
        """Wait, and let go of threads and connections."""
        self.uploader.wait_and_close()


def download_monolithic_checkpoint(
    source_uri: str, destination_path: str, global_rank_zero_only: bool = True
) -> str | None:
    """Download a checkpoint of one file on one rank, or on one rank of each node. There is no barrier.

    Args:
        source_uri: The address of the file, or of a `.symlink` that names it.
        destination_path: The file that it becomes, or a folder for it.
        global_rank_zero_only: Whether only rank 0 downloads, and not the first rank of each node.

    Returns:
        Where the file is, on the ranks that downloaded it; `None` on the others.

    Raises:
        FileNotFoundError: If there is no such file.
        StorageError: If the store still fails at the fifth attempt.
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
    """Upload this rank's file, and let a pointer name it once it has arrived.

    With `symlink_granularity='dir'`, every rank must call this.

    Args:
        dest_dir: The address of the folder in which the file keeps its name.
        source_path: The file; `None` on ranks that have none.
        symlink_granularity: `'file'` for a pointer to this file; `'dir'` for one to the folder, once the files of all
            ranks have arrived; `None` for no pointer.
        symlink_name: The pointer's name in the folder.
        async_upload: Whether to return at once. Errors are then raised at the end of a batch, and the end of training
            waits.
        state: The training's state, among whose callbacks the one that does so is found or put. Needed with
            `async_upload`.
        overwrite: Whether an object that has the file's name is replaced.

    Raises:
        ValueError: If `symlink_granularity` is something else, or `async_upload` has no `state`.
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
        names = [gathered for gathered in _gather(name) if gathered is not None]
        if get_global_rank() == 0:
            uploader.point_async(pointer, folder, names)
    if not async_upload:
        uploader.wait_and_close()


def _uploader_of(state: "State | None", dest_dir: str) -> RemoteUploader:
    if state is None:
        raise ValueError("state=None: an upload in the background needs the state, whose callbacks wait for it.")
    place = parse_uri(dest_dir)[:2]
    for callback in state.callbacks:
        if isinstance(callback, CheckpointUploadCallback) and parse_uri(callback.remote_folder)[:2] == place:
            return callback.uploader
    callback = CheckpointUploadCallback(dest_dir)
    state.callbacks.append(callback)
    return callback.uploader


def _gather(name: str | None) -> list[str | None]:
    from composer_dist import dist  # it imports torch

    return dist.all_gather_object(name)
