"""Upload and download committed checkpoints. A pointer is written only after the upload has been verified."""

import logging
import os
import posixpath
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from composer_checkpoint.commit import write_atomically
from composer_checkpoint.errors import CorruptCheckpointError, NoCheckpointError, StorageError
from composer_checkpoint.manifest import MANIFEST_NAME, METADATA_NAME, SIDECAR_SUFFIX, Manifest, first_difference
from composer_checkpoint.stores.base import ObjectStore, ObjectStoreTransientError, has_object, read_object, retry
from composer_checkpoint.stores.fsspec import FsspecObjectStore

log = logging.getLogger(__name__)

SYMLINK_SUFFIX = ".symlink"


_Piece = tuple[Path, str]  # a local file, and the name of its object


def publish_checkpoint(
    path: str | os.PathLike[str],
    store: ObjectStore,
    remote_name: str,
    *,
    pointer: str | None = None,
    overwrite: bool = False,
    num_attempts: int = 3,
    num_concurrent_uploads: int = 4,
) -> None:
    """Upload a committed checkpoint, verify it in the store, and then write the pointer.

    Data is uploaded first, then the index of a sharded checkpoint, then the manifest. Next, the size of each object is
    checked and the manifest is read back. Last, the pointer is written and read back. A writer that dies in between
    leaves objects without a manifest or pointer, which the next attempt replaces.

    Args:
        path: A file or a folder.
        store: Destination.
        remote_name: Object name of a file; for a folder, the prefix of the names of its objects.
        pointer: Name of the pointer without its suffix `.symlink`; `None` for none. It holds `remote_name`.
        overwrite: Whether to replace a complete checkpoint of this name.
        num_attempts: Number of attempts per object.
        num_concurrent_uploads: Number of simultaneous uploads.

    Raises:
        NoCheckpointError: If there is nothing at `path`.
        FileExistsError: If the store has a complete checkpoint of this name and `overwrite` is false.
        StorageError: If the store refuses, the last attempt fails too, or the stored bytes differ. The pointer is
            not moved to this checkpoint.

    Example:
        >>> from composer_checkpoint.stores import FsspecObjectStore
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint = Path(folder) / "ep1.pt"
        ...     _ = checkpoint.write_bytes(b"weights")
        ...     store = FsspecObjectStore("memory://docs-publishing")
        ...     publish_checkpoint(checkpoint, store, "run/ep1.pt", pointer="run/latest.pt", overwrite=True)
        >>> store.list_objects("run/")
        ['run/ep1.pt', 'run/latest.pt.symlink']
    """
    data, seals = _plan(Path(path), remote_name.strip("/"))
    # The object that is uploaded last: if it exists, the checkpoint is complete.
    vouching, vouching_name = (seals or data)[-1]
    if not overwrite and has_object(store, vouching_name, num_attempts):
        raise _exists(store, vouching_name)

    def send(piece: _Piece) -> None:
        upload_with_retries(store, piece[1], piece[0], overwrite=True, num_attempts=num_attempts)

    with ThreadPoolExecutor(max(1, num_concurrent_uploads), thread_name_prefix="publish") as pool:
        list(pool.map(send, data))  # `list` raises the first error
    # Only after all data: a manifest in the store means that the objects in it are complete.
    for piece in seals[:-1]:
        send(piece)
    if seals:
        _seal(store, vouching, vouching_name, overwrite, num_attempts)
    # Only at the end, since another writer may have replaced objects, and not every store checks its uploads.
    # An object that is not seen yet is looked up again, since the store may be eventually consistent.
    size_of = retry((ObjectStoreTransientError, FileNotFoundError), num_attempts)(store.get_object_size)
    for source, name in (*data, *seals):
        sent, uri = source.stat().st_size, store.get_uri(name)
        try:
            stored = size_of(name)
        except FileNotFoundError as error:
            raise ObjectStoreTransientError(f"{uri} cannot be seen after it was uploaded. Upload it again.") from error
        if stored != sent:
            raise StorageError(
                f"{uri} holds {stored} of the {sent} bytes that were sent, so no pointer was moved to this checkpoint. "
                f"Upload it again, or save elsewhere."
            )
    if seals and not _reads_back(store, vouching_name, vouching.read_bytes(), num_attempts):
        raise StorageError(
            f"{store.get_uri(vouching_name)} does not read back as it was sent, so no pointer was moved to this "
            f"checkpoint. Another writer may use the same name, or the store loses data: save elsewhere."
        )
    if pointer is not None:  # last, so that it never points to an incomplete checkpoint
        write_pointer(store, pointer + SYMLINK_SUFFIX, remote_name.strip("/"), num_attempts=num_attempts)
    log.info("Uploaded %s to %s", path, store.get_uri(remote_name))


def fetch_checkpoint(
    store: ObjectStore,
    remote_name: str,
    destination: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    num_attempts: int = 3,
    num_concurrent_downloads: int = 4,
) -> None:
    """Download a checkpoint that `publish_checkpoint` uploaded, atomically.

    A folder is verified by its manifest before it appears at `destination`.

    Args:
        store: Source.
        remote_name: Object name of a file, or the prefix of the names of a folder's objects.
        destination: Local file or folder to write.
        overwrite: Whether to replace an existing `destination`.
        num_attempts: Number of attempts per object.
        num_concurrent_downloads: Number of simultaneous downloads.

    Raises:
        NoCheckpointError: If the store has neither a file of this name nor a manifest below it.
        FileExistsError: If `destination` exists and `overwrite` is false.
        CorruptCheckpointError: If the manifest is invalid, or an object differs from its entry.
        StorageError: If the last attempt fails too.
    """
    name = remote_name.strip("/")
    download = retry(ObjectStoreTransientError, num_attempts)(store.download_object)
    # Only folders have a manifest below their name, so without one the name is tried as a file.
    try:
        with write_atomically(destination, overwrite=overwrite, folder=True) as unfinished:
            # The names of the files come from the manifest, since stores need not support listing.
            download(f"{name}/{MANIFEST_NAME}", str(unfinished / MANIFEST_NAME))
            manifest = Manifest.from_json((unfinished / MANIFEST_NAME).read_bytes())
            for part in manifest.files:  # they become local paths
                if part in ("", MANIFEST_NAME) or part[:1] == "/" or {"\\", "\0"} & {*part} or ".." in part.split("/"):
                    raise CorruptCheckpointError(
                        f"the manifest of {store.get_uri(name)} names the file {part!r}, which leads out of the "
                        f"checkpoint's folder or is not one of its files. Nothing of it was fetched; do not use this "
                        f"checkpoint."
                    )
            with ThreadPoolExecutor(max(1, num_concurrent_downloads), thread_name_prefix="fetch") as pool:
                list(pool.map(lambda part: download(f"{name}/{part}", str(unfinished / part)), manifest.files))
            if (path := first_difference(unfinished, manifest)) is not None:
                part = path.relative_to(unfinished).as_posix()
                entry = manifest.files[part]
                raise CorruptCheckpointError(
                    f"{store.get_uri(name)}/{part} is not what the manifest says: {entry.size_bytes} bytes with the "
                    f"hash {entry.hash[:12]}... Load another checkpoint."
                )
        return
    except FileExistsError:
        raise
    except FileNotFoundError as error:
        if not has_object(store, name, num_attempts):
            raise NoCheckpointError(
                f"{store.get_uri(name)} is not a checkpoint: there is neither a file of this name nor a whole folder "
                f"with a {MANIFEST_NAME} ({error}). Check the name, or name an older checkpoint."
            ) from error
    download(name, destination, overwrite=overwrite)


def write_pointer(store: ObjectStore, pointer: str, target: str, *, num_attempts: int = 3) -> None:
    """Write a pointer object, and verify it by reading it back."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "pointer"
        text.write_text(target)
        upload_with_retries(store, pointer, text, overwrite=True, num_attempts=num_attempts)
    if not _reads_back(store, pointer, target.encode(), num_attempts):
        raise StorageError(
            f"{store.get_uri(pointer)} does not read back as {target!r}. Another run may use the same name: give each "
            f"run a folder of its own."
        )


def upload_with_retries(
    store: ObjectStore, object_name: str, filename: str | os.PathLike[str], *, overwrite: bool, num_attempts: int
) -> None:
    """Upload a file, retrying after transient errors.

    Only the first attempt rejects an existing object: later ones may find the object of an earlier attempt, which may
    have succeeded although it raised an error.
    """

    @retry(ObjectStoreTransientError, num_attempts)
    def attempt(retry_index: int = 0) -> None:
        if not overwrite and retry_index == 0:
            with suppress(FileNotFoundError):
                store.get_object_size(object_name)
                raise _exists(store, object_name)
        store.upload_object(object_name, os.fspath(filename))

    attempt()


def _plan(path: Path, remote_name: str) -> tuple[list[_Piece], list[_Piece]]:
    if path.is_dir():
        names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        # Readers recognize a folder by these.
        last = [name for name in ("config.json", "adapter_config.json", METADATA_NAME, MANIFEST_NAME) if name in names]
        data, seals = (
            [(path / name, posixpath.join(remote_name, name)) for name in some]
            for some in ([name for name in names if name not in last], last)
        )
    else:
        sidecar = path.with_name(path.name + SIDECAR_SUFFIX)
        data = [(path, remote_name)] if path.is_file() else []
        seals = [(sidecar, remote_name + SIDECAR_SUFFIX)] if sidecar.is_file() else []
    if not data:
        raise NoCheckpointError(f"{path} cannot be uploaded: there is no file or folder with files of this name.")
    return data, seals


def _exists(store: ObjectStore, name: str) -> FileExistsError:
    return FileExistsError(
        f"Object {store.get_uri(name)} already exists, but overwrite was set to False. Choose another name or folder, "
        f"or pass save_overwrite=True."
    )


def _seal(store: ObjectStore, path: Path, name: str, overwrite: bool, num_attempts: int) -> None:
    """Upload the object that completes the checkpoint, so that only one of two writers succeeds."""
    # Only this class has conditional writes; other stores were checked by the caller, which leaves a race.
    if overwrite or not isinstance(store, FsspecObjectStore):
        upload_with_retries(store, name, path, overwrite=True, num_attempts=num_attempts)
        return

    @retry(ObjectStoreTransientError, num_attempts)
    def create(retry_index: int = 0) -> None:
        # Later attempts may find the object of the first one, complete or not.
        store.upload_object(name, path, overwrite=retry_index > 0)

    try:
        create()
    except FileExistsError:
        # A retry inside the client library may have found the object of its own earlier attempt.
        if not _reads_back(store, name, path.read_bytes(), num_attempts):
            raise


def _reads_back(store: ObjectStore, name: str, expected: bytes, num_attempts: int) -> bool:
    """Return whether an object holds these bytes, retrying while the store shows old ones."""

    @retry(ObjectStoreTransientError, num_attempts)
    def look(retry_index: int = 0) -> bool:
        try:
            found = read_object(store, name)
        except FileNotFoundError as error:
            raise ObjectStoreTransientError(f"{store.get_uri(name)} cannot be seen yet.") from error
        if found != expected and retry_index + 1 < num_attempts:  # the store may return outdated bytes
            raise ObjectStoreTransientError(f"{store.get_uri(name)} reads back with other content.")
        return found == expected

    return look()
