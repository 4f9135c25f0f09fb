"""Atomic creation of files, folders and links."""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from composer_checkpoint import _durability as durability
from composer_checkpoint.errors import (
    CheckpointConflictError,
    CorruptCheckpointError,
    StorageError,
    as_storage_error,
    free_bytes,
)
from composer_checkpoint.lock import complete_earlier_sets
from composer_checkpoint.names import sibling_name

if TYPE_CHECKING:
    from composer_checkpoint._ranks import Ranks

_OF_CHECKPOINT = re.compile(
    r"__\d+_\d+\.distcp|\.metadata|composer_manifest\.json"
    r"|(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
)
_RACED = {errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST}


@contextmanager
def write_atomically(
    path: str | os.PathLike[str],
    *,
    overwrite: bool = True,
    folder: bool = False,
    need_bytes: int | None = None,
    keep_others: bool = False,
) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` in one step at the end.

    The temporary path is in the same folder. At the end, everything written is flushed to disk, then renamed, then the
    folder is flushed. A process that is killed at any time leaves either the old content or the new, complete one.
    After an exception nothing new is left.

    Args:
        path: The final name. Its parent folders are created.
        overwrite: Whether existing content may be replaced; a file never replaces a folder.
        folder: Whether a folder is written instead of a file. It is created, empty, before the body begins.
        need_bytes: The size in bytes of the new content, to raise before writing if it cannot fit.
        keep_others: Whether to keep files of a replaced folder that `is_of_checkpoint` does not recognize.

    Yields:
        The temporary path.

    Raises:
        CheckpointConflictError: If `path` exists and `overwrite` is false, or it is a folder and a file is written; it
            is a `FileExistsError`.
        StorageError: If the disk is full, read-only, not permitted or broken; it is an `OSError`.
        RuntimeError: If the body wrote nothing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with write_atomically(Path(folder) / "weights.bin") as unfinished:
        ...         _ = unfinished.write_bytes(b"1234")
        ...     os.listdir(folder)
        ['weights.bin']
    """
    final = Path(os.path.abspath(path))  # the body may change the current folder
    refuse_existing(final, overwrite, folder=folder)
    temporary = sibling_name(final)
    with _whole_or_nothing(temporary, final, need_bytes):
        # Before anything is written, so that a full disk keeps the old checkpoint and no temporary file.
        free = free_bytes(final) if need_bytes is not None else None
        if need_bytes is not None and free is not None and free < need_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        durability.make_folders(final.parent)
        if folder:
            temporary.mkdir()
        yield temporary
        if keep_others and durability.is_folder(final):
            _keep_others(final, temporary)
        if not os.path.lexists(temporary):
            raise RuntimeError(f"Nothing was written to {temporary}, which was to become {final}. Write to that path.")
        durability.sync_tree(temporary)
        _put_in_place(temporary, final, overwrite)


def is_of_checkpoint(name: str) -> bool:
    """Return whether a file of this name in a folder would be read as weights or shards of a checkpoint.

    Example:
        >>> [is_of_checkpoint(name) for name in ("model-00001-of-00002.safetensors", "tokenizer.json", "notes.md")]
        [True, False, False]
    """
    return _OF_CHECKPOINT.fullmatch(name) is not None


def write_beside(
    temporary: Path, final: Path, write: Callable[[Path], object], *, overwrite: bool, is_in_set: bool = True
) -> None:
    """Write a file under a temporary name, for `put_in_place` to rename. An exception deletes it.

    `write` must flush the file to the disk, as `save_file` does: a second flush takes as long. `is_in_set` tells
    whether a record will name the temporary file.
    """
    refuse_existing(final, overwrite)
    with _whole_or_nothing(temporary, final):
        durability.make_folders(final.parent)
        write(temporary)
        if is_in_set:
            durability.sync_path(final.parent)  # so that the record never outlasts the file


def put_in_place(temporary: Path, final: Path, *, overwrite: bool) -> None:
    """Rename a file from `write_beside` to its final name. After an exception it keeps the temporary one."""
    try:
        _put_in_place(temporary, final, overwrite)
    except CheckpointConflictError:
        raise
    except OSError as error:
        raise StorageError(
            error.errno,
            f"{final} is written, but could not be renamed: {error.strerror or error}. What was there before is "
            f"unchanged. Check the file system, and save again",
        ) from error


def refuse_existing(final: Path, overwrite: bool, *, folder: bool = False) -> None:
    """Raise if a name is taken and may not be replaced. A file never replaces a folder, which may hold anything."""
    if not overwrite and os.path.lexists(final):
        raise _conflict(final)
    if not folder and durability.is_folder(final):
        raise CheckpointConflictError(
            f"{final} is a folder, and a file is to be written. Give the file a name of its own, or remove the folder "
            f"yourself."
        )


@contextmanager
def _whole_or_nothing(temporary: Path, final: Path, need_bytes: int | None = None) -> Iterator[None]:
    """Delete the temporary file after an exception, and raise disk problems as a `StorageError`."""
    try:
        yield
    except BaseException as error:
        written = _size_bytes(temporary)
        # Deleted after its size was taken, and before the error is raised, to free a full disk.
        durability.discard(temporary)
        storage_error = as_storage_error(error, final, max(need_bytes or 0, written) or None)
        if storage_error is not None:
            raise storage_error from error
        raise


def _keep_others(final: Path, temporary: Path) -> None:
    for entry in os.scandir(final):
        place = temporary / entry.name
        if os.path.lexists(place) or is_of_checkpoint(entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.copytree(entry.path, place, symlinks=True, copy_function=_link_or_copy)
        else:
            _link_or_copy(entry.path, place)


def _link_or_copy(source: str | os.PathLike[str], place: str | os.PathLike[str]) -> None:
    try:
        os.link(source, place, follow_symlinks=False)
    except OSError:  # the file system has no hard links
        shutil.copy2(source, place, follow_symlinks=False)


def _put_in_place(temporary: Path, final: Path, overwrite: bool) -> None:
    if not overwrite:
        try:
            durability.rename_without_replacing(temporary, final)
        except FileExistsError as error:
            raise _conflict(final) from error
    elif temporary.is_dir():
        _replace_folder(temporary, final)
    else:
        os.replace(temporary, final)
    durability.sync_path(final.parent)
    durability.discard(temporary)  # after a swap, the temporary name holds the folder that was replaced


def _replace_folder(temporary: Path, final: Path) -> None:
    """Replace a folder that may exist, for which a plain rename is not atomic."""
    # Whether the folder exists may change between the check and the rename, so a lost race is tried again.
    for attempts_left in reversed(range(8)):
        try:
            if not os.path.lexists(final):
                durability.rename_without_replacing(temporary, final)
            elif not durability.exchange(temporary, final):
                _move_aside_and_replace(temporary, final)
            return
        except OSError as error:
            if error.errno not in _RACED or not attempts_left:
                raise


def _move_aside_and_replace(temporary: Path, final: Path) -> None:
    aside = sibling_name(final, "old")
    # Without a swap, the name is missing between the two renames; `remove_leftovers` repairs that after a crash.
    os.rename(final, aside)
    try:
        os.rename(temporary, final)
    except BaseException:
        os.rename(aside, final)
        raise
    durability.sync_path(final.parent)
    durability.discard(aside)


def _conflict(final: Path) -> CheckpointConflictError:
    return CheckpointConflictError(
        f"{final} exists, and overwrite=False. Choose another name or folder, or pass overwrite=True to replace it."
    )


def _size_bytes(path: Path) -> int:
    files = [Path(root, name) for root, _, names in os.walk(path) for name in names] or [path]
    size = 0
    for file in files:
        with suppress(OSError):
            size += file.lstat().st_size
    return size


def write_on_rank_zero(
    path: str | os.PathLike[str], write: Callable[[Path], object], ranks: "Ranks", *, overwrite: bool = True
) -> None:
    """Write a file atomically on rank 0; it exists when this returns. Every rank must call this."""
    final = Path(os.path.abspath(path))
    temporary = sibling_name(final)

    def commit(done: list[None]) -> list[None]:
        put_in_place(temporary, final, overwrite=overwrite)
        return done

    with ExitStack() as undo:
        if ranks.rank == 0:
            undo.callback(durability.discard, temporary)
        # Renamed in a separate step, so that a write that has timed out never becomes a checkpoint.
        begin = partial(write_beside, temporary, final, write, overwrite=overwrite, is_in_set=False)
        ranks.exchange(begin if ranks.rank == 0 else lambda: None, commit)


_LONGEST_TEXT_BYTES = 4096
_NO_SYMLINKS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


def replace_pointer(link: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Point a link to a checkpoint in one step, so that readers see either the old target or the new one.

    The link is relative, so that its folder can be moved. On a file system without links it is a text file with the
    relative path, which `read_pointer` also reads.

    Args:
        link: The name of the link. An existing link or file is replaced.
        target: The file or folder to point to, as the caller would open it.

    Raises:
        CheckpointConflictError: If `link` is the name of a folder, or of the target.
        StorageError: If the link cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     replace_pointer(f"{folder}/latest.pt", f"{folder}/ep1.pt")
        ...     os.readlink(f"{folder}/latest.pt")
        'ep1.pt'
    """
    link = Path(os.path.abspath(link))
    if link == Path(os.path.abspath(target)):
        raise CheckpointConflictError(
            f"{link} is a checkpoint, which a link to itself would replace. Choose another name for the link."
        )
    refuse_folder(link)
    temporary = sibling_name(link)
    try:
        durability.make_folders(link.parent)
        # Made under another name and renamed, since a link cannot be changed in place.
        text = os.path.relpath(os.path.abspath(target), link.parent)
        try:
            os.symlink(text, temporary)
        except OSError as error:
            if error.errno not in _NO_SYMLINKS:
                raise
            temporary.write_text(text)  # raises if writing is not permitted either
            durability.sync_path(temporary)
        os.replace(temporary, link)
        durability.sync_path(link.parent)
    except OSError as error:
        if os.path.lexists(temporary):
            temporary.unlink()
        raise as_storage_error(error, link) or error from error


def refuse_folder(link: str | os.PathLike[str]) -> None:
    """Raise if the name of a link is that of a folder."""
    if durability.is_folder(Path(link)):
        raise CheckpointConflictError(
            f"{os.fspath(link)} is a folder, so that no link to the latest checkpoint can have this name. Move it "
            f"away, or choose another name for the link."
        )


def read_pointer(link: str | os.PathLike[str]) -> Path | None:
    """Return the target of a pointer, or `None` if `link` is not a pointer.

    Args:
        link: A symbolic link, whose target need not exist; or a text file from `replace_pointer`. A short text file
            counts as a pointer only if it names an existing file in the same folder.
    """
    link = Path(link)
    if link.is_symlink():
        return Path(os.path.normpath(link.parent / os.readlink(link)))
    try:
        if not link.is_file() or not 0 < link.stat().st_size <= _LONGEST_TEXT_BYTES:
            return None
        target = Path(os.path.normpath(link.parent / read_pointer_text(link.read_bytes(), str(link))))
        return target if target.exists() and target.parent == link.parent and target != link else None
    except (OSError, CorruptCheckpointError):
        return None


def read_pointer_text(content: bytes, name: str) -> str:
    """Return the path in the text of a pointer, such as a `.symlink` object of a remote store.

    Example:
        >>> read_pointer_text(b"run/checkpoints/ep1.pt", "latest.symlink")
        'run/checkpoints/ep1.pt'
    """
    try:
        text = content.decode().strip()
    except UnicodeDecodeError:
        text = ""
    if not text or len(content) > _LONGEST_TEXT_BYTES or not text.isprintable():
        raise CorruptCheckpointError(
            f"{name} is not a pointer to a checkpoint: it holds {content[:40]!r} ({len(content)} bytes), and one line "
            f"with a path is expected. Name the checkpoint itself."
        )
    return text


def record_set(files: list[tuple[Path, Path]]) -> list[Path | None]:
    """Record the final and the temporary name of each file, so that the set can be completed after a kill."""
    if len(files) == 1:
        return [None]
    folder = Path(os.path.commonpath([final.parent for final, _ in files]))
    # Complete an interrupted earlier save first. Done later, its record would put its files over those of this save.
    complete_earlier_sets(folder, {final for final, _ in files})
    record = sibling_name(folder / files[0][0].name, "set")
    with write_atomically(record) as unfinished:
        unfinished.write_text(durability.describe_set(dict(files), folder))
    return [record] * len(files)
