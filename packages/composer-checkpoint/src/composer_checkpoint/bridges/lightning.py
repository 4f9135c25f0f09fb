"""`CheckpointIO` for Lightning whose files are written atomically, verified, and safe to open."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_checkpoint.commit import write_atomically
from composer_checkpoint.errors import NoCheckpointError
from composer_checkpoint.files import load_file, save_file
from composer_checkpoint.sharded._storage import is_remote
from composer_checkpoint.stores.base import ObjectStoreTransientError, retry

if TYPE_CHECKING:
    from lightning.pytorch.plugins.io import CheckpointIO

    from composer_checkpoint.stores.fsspec import FsspecObjectStore
else:
    try:
        from lightning.pytorch.plugins.io import CheckpointIO
    except ImportError as error:
        raise ImportError(
            f"{error}: composer_checkpoint.bridges.lightning needs Lightning. Install it with "
            "`pip install 'composer-checkpoint[lightning]'`."
        ) from error

__all__ = ["VerifiedCheckpointIO"]

_ATTEMPTS = 3


class VerifiedCheckpointIO(CheckpointIO):
    """Lightning plugin that saves and loads checkpoints with `save_file` and `load_file`.

    Files are written atomically, the hashes of their tensors are compared on loading, and no code in them is run.
    Files that Lightning itself wrote can be read too.

    `path` may be a URI that fsspec supports.

    Args:
        verify: Whether to compare hashes. Sizes are always compared.
        trusted: Whether a file may run code of its own while it is loaded, as hyperparameters of custom classes do.
            Without it, such objects are refused on saving. Lightning's `weights_only` has no effect.

    Example:
        Pass it to the Trainer:

            trainer = Trainer(plugins=[VerifiedCheckpointIO()])
    """

    def __init__(self, *, verify: bool = True, trusted: bool = False) -> None:
        super().__init__()
        self._verify = verify
        self._trusted = trusted

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint, replacing an existing one of this name.

        Args:
            checkpoint: Lightning's dict.
            path: Path or URI of the file.
            storage_options: Options for fsspec, if `path` is a URI.

        Raises:
            UnsafeCheckpointError: If the dict has more than data, and `trusted` is false.
            StorageError: If the disk fails, or the third attempt to upload the file fails too.
        """
        info = {key: checkpoint[key] for key in ("epoch", "global_step") if isinstance(checkpoint.get(key), int)}
        if not is_remote(path):
            with write_atomically(path) as unfinished:
                save_file(checkpoint, unfinished, info=info, allow_untrusted=self._trusted)
            return
        store, name = _store_of(path, storage_options)
        with tempfile.TemporaryDirectory(prefix="composer-checkpoint-") as folder:
            # Under the same name, whose suffix selects the format.
            local = os.path.join(folder, name)
            save_file(checkpoint, local, info=info, allow_untrusted=self._trusted)
            retry(ObjectStoreTransientError, _ATTEMPTS)(store.upload_object)(name, local)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Check and load a checkpoint.

        Raises:
            NoCheckpointError: If the checkpoint does not exist.
            UnsafeCheckpointError: If it has more than data.
            CorruptCheckpointError: If it differs from what was written.
        """
        with _local_file(path) as local:
            return load_file(
                local,
                map_location="cpu" if map_location is None else map_location,
                mmap=not is_remote(path),  # the local copy of a remote file is deleted after loading
                verify=self._verify,
                trusted=self._trusted,
            )

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint, if it exists."""
        if is_remote(path):
            store, name = _store_of(path)
            files, remote = store.filesystem, store.filesystem_path(name)
            if files.exists(remote):
                files.rm(remote, recursive=True)
        elif os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            Path(path).unlink(missing_ok=True)


def _store_of(path: str | Path, storage_options: Any | None = None) -> "tuple[FsspecObjectStore, str]":
    # Imported here so that local checkpoints do not load the stores.
    from composer_checkpoint.stores.fsspec import FsspecObjectStore

    parent, _, name = os.fspath(path).rstrip("/").rpartition("/")
    return FsspecObjectStore(parent, **(storage_options or {})), name


@contextmanager
def _local_file(path: str | Path) -> Iterator[str]:
    """Yield the path itself, or that of a local copy of a remote file."""
    if not is_remote(path):
        yield os.fspath(path)
        return
    store, name = _store_of(path)
    with tempfile.TemporaryDirectory(prefix="composer-checkpoint-") as folder:
        local = os.path.join(folder, name)
        try:
            store.download_object(name, local)
        except FileNotFoundError as error:
            raise NoCheckpointError(f"{path} does not exist. Check the URI.") from error
        yield local
