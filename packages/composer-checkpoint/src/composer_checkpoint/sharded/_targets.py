"""Where the files of a sharded checkpoint are written: aside first, and seen only when all of them are there."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from composer_checkpoint.commit import write_atomically
from composer_checkpoint.errors import CheckpointConflictError
from composer_checkpoint.manifest import MANIFEST_NAME

__all__ = ["METADATA_NAME", "LocalTarget", "RemoteTarget", "Target", "is_remote", "open_target"]

METADATA_NAME = ".metadata"


class Target(Protocol):
    """A folder in the making. Rank 0 begins and ends it; every rank writes files into the place it was told."""

    def begin(self, need_bytes: int) -> str:
        """Refuse what must not be overwritten or cannot fit, and return the place where files go for now."""
        ...

    def open(self, place: str, name: str) -> BinaryIO:
        """Open a new file for writing."""
        ...

    def commit(self) -> None:
        """Let what was written be seen under the folder's own name."""
        ...

    def abort(self, error: BaseException) -> None:
        """Remove what was written."""
        ...


def is_remote(folder: str | os.PathLike[str]) -> bool:
    """Return whether this is a URI and not a local path."""
    return isinstance(folder, str) and "://" in folder


def open_target(folder: str | os.PathLike[str], overwrite: bool, storage_options: dict[str, Any]) -> Target:
    """Return the target for a local path or a URI that fsspec knows."""
    if is_remote(folder):
        return RemoteTarget(cast(str, folder), overwrite, storage_options)
    return LocalTarget(Path(folder), overwrite)


class LocalTarget:
    """A folder that gets its name by one rename."""

    def __init__(self, folder: Path, overwrite: bool) -> None:
        self._folder = folder
        self._overwrite = overwrite
        self._unfinished = ExitStack()

    def begin(self, need_bytes: int) -> str:
        """Make a temporary folder beside the real one."""
        _refuse_other_folder(self._folder)
        settings = {"overwrite": self._overwrite, "folder": True, "keep_others": True}
        unfinished = write_atomically(self._folder, need_bytes=need_bytes, **settings)
        return str(self._unfinished.enter_context(unfinished))

    def open(self, place: str, name: str) -> BinaryIO:
        """Open a file of the temporary folder."""
        return Path(place, name).open("xb")

    def commit(self) -> None:
        """Flush and rename."""
        self._unfinished.close()

    def abort(self, error: BaseException) -> None:
        """Remove the temporary folder."""
        unfinished, self._unfinished = self._unfinished, ExitStack()
        try:
            unfinished.__exit__(type(error), error, error.__traceback__)
        except BaseException as same:
            if same is not error and same.__cause__ is not error:
                raise


def _refuse_other_folder(folder: Path) -> None:
    """Raise if a folder would be replaced that holds something, and no sharded checkpoint."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    is_sharded = any(name in (METADATA_NAME, MANIFEST_NAME) or name.endswith(".distcp") for name in names)
    if names and not is_sharded:
        raise CheckpointConflictError(
            f"{folder} is a folder with {', '.join(names[:5])}, which is no sharded checkpoint, and only such a one is "
            f"replaced. Choose another name, or remove the folder yourself."
        )


class RemoteTarget:
    """A folder of a remote store, where nothing can be renamed: the manifest, which makes it whole, comes last."""

    def __init__(self, folder: str, overwrite: bool, storage_options: dict[str, Any]) -> None:
        # Here, so that local checkpoints do not load the stores.
        from composer_checkpoint.sharded._addresses import store_of
        from composer_checkpoint.stores.fsspec_store import FsspecObjectStore

        store, name = store_of(folder, storage_options)
        if not isinstance(store, FsspecObjectStore):
            raise ValueError(
                f"folder={folder!r}: {type(store).__name__} takes whole files only, and a sharded checkpoint is "
                f"written piece by piece. Save to S3 or another store that fsspec reaches, or one file with "
                f"state_dict_type='full'."
            )
        self._store, self._root = store.filesystem, store.filesystem_path(name)
        self._store.invalidate_cache()  # stores remember listings, and others write
        self._folder = folder.rstrip("/")
        self._overwrite = overwrite

    def begin(self, need_bytes: int) -> str:
        """Take away what made an older checkpoint of this name whole, if it may be overwritten."""
        for name in (MANIFEST_NAME, METADATA_NAME):
            if not self._store.exists(f"{self._root}/{name}"):
                continue
            if not self._overwrite:
                raise CheckpointConflictError(
                    f"{self._folder} holds a checkpoint, and overwrite=False. Choose another name, or pass "
                    f"overwrite=True to replace it."
                )
            self._store.rm_file(f"{self._root}/{name}")
        self._store.makedirs(self._root, exist_ok=True)
        return self._root

    def open(self, place: str, name: str) -> BinaryIO:
        """Open an object of the folder."""
        return cast(BinaryIO, self._store.open(f"{place}/{name}", "wb"))

    def commit(self) -> None:
        """Do nothing more: the manifest was written last."""

    def abort(self, error: BaseException) -> None:
        """Leave what was written; without a manifest and `.metadata` nobody takes it for a checkpoint."""
