"""Bringing a file or folder into being whole or not at all."""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from composer_checkpoint._durability import exchange, make_folders, rename_without_replacing, sync_path, sync_tree
from composer_checkpoint._ranks import Ranks
from composer_checkpoint.errors import (
    CheckpointConflictError,
    CorruptCheckpointError,
    StorageError,
    as_storage_error,
    require_space,
)
from composer_checkpoint.lock import discard, find_leftovers, is_folder, remove_leftovers, remove_leftovers_of
from composer_checkpoint.names import name_beside

__all__ = [
    "find_leftovers",
    "is_of_checkpoint",
    "put_in_place",
    "refuse_existing",
    "remove_leftovers",
    "remove_leftovers_of",
    "replace_pointer",
    "sync_tree",
    "write_atomically",
    "write_beside",
    "read_pointer",
    "read_pointer_text",
    "refuse_folder",
]

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
    """Yield a path to write to; what is there at the end gets its real name in one step.

    The temporary path is beside the real one. At the end, all that is written is flushed to the disk, then it is
    renamed, then the folder is flushed. A process that is killed at any instant leaves either what was there before
    or the new one, and never less. After an exception nothing new is left.

    Args:
        path: The real name. Folders above it are made.
        overwrite: Whether something that has this name may be replaced; never a folder by a file.
        folder: Whether a folder is written instead of a file. It is there, empty, when the body begins.
        need_bytes: How much will be written, to refuse before anything is if it cannot fit.
        keep_others: Whether what a folder that is replaced has and `is_of_checkpoint` does not know stays in it.

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
    if need_bytes is not None:
        require_space(final, need_bytes)
    temporary = name_beside(final)
    with _whole_or_nothing(temporary, final, need_bytes):
        make_folders(final.parent)
        if folder:
            temporary.mkdir()
        yield temporary
        if keep_others and is_folder(final):
            _keep_others(final, temporary)
        _flush(temporary, final)
        _put_in_place(temporary, final, overwrite)


def is_of_checkpoint(name: str) -> bool:
    """Return whether a file of this name in a folder would be read as weights or shards of a checkpoint there.

    Example:
        >>> [is_of_checkpoint(name) for name in ("model-00001-of-00002.safetensors", "tokenizer.json", "notes.md")]
        [True, False, False]
    """
    return _OF_CHECKPOINT.fullmatch(name) is not None


def write_beside(temporary: Path, final: Path, write: Callable[[Path], object], *, overwrite: bool) -> None:
    """Write a file under a temporary name and flush it, for `put_in_place` to rename. After an exception it is gone.

    Args:
        temporary: From `name_beside(final)`.
        final: The name that it will get. Folders above it are made.
        write: Writes to the path that it is given.
        overwrite: Whether something that has this name may be replaced.

    Raises:
        CheckpointConflictError: If `final` exists and `overwrite` is false.
        StorageError: If the disk is full, read-only, not permitted or broken.
    """
    refuse_existing(final, overwrite)
    with _whole_or_nothing(temporary, final):
        make_folders(final.parent)
        write(temporary)
        _flush(temporary, final)
        sync_path(final.parent)  # so that what names the temporary file never outlasts it


def put_in_place(temporary: Path, final: Path, *, overwrite: bool) -> None:
    """Give a file that was written by `write_beside` its name. After an exception it has still the temporary one.

    Raises:
        CheckpointConflictError: If `final` exists and `overwrite` is false.
        StorageError: If the file system refuses.
    """
    try:
        _put_in_place(temporary, final, overwrite)
    except CheckpointConflictError:
        raise
    except OSError as error:
        raise StorageError(
            error.errno,
            f"{final} is written, and could not be given its name: {error.strerror or error}. What was there before is "
            f"untouched. Look after the file system, and save again",
        ) from error


def refuse_existing(final: Path, overwrite: bool, *, folder: bool = False) -> None:
    """Raise if something has a name that is to be given to something new.

    Args:
        final: The name.
        overwrite: Whether what has it may be replaced.
        folder: Whether the new one is a folder. A file never replaces one, whose files nobody has spoken of.

    Raises:
        CheckpointConflictError: If what is there may not be replaced.
    """
    if not overwrite and os.path.lexists(final):
        raise _conflict(final)
    if not folder and is_folder(final):
        raise CheckpointConflictError(
            f"{final} is a folder, and a file is to be written. Give the file a name of its own, or remove the folder "
            f"yourself."
        )


@contextmanager
def _whole_or_nothing(temporary: Path, final: Path, need_bytes: int | None = None) -> Iterator[None]:
    """Remove what is unfinished after an exception, and say what the disk has to do with it."""
    try:
        yield
    except BaseException as error:
        written = _size_bytes(temporary)
        discard(temporary)
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
    except OSError:  # a file system without hard links
        shutil.copy2(source, place, follow_symlinks=False)


def _flush(temporary: Path, final: Path) -> None:
    if not os.path.lexists(temporary):
        raise RuntimeError(f"Nothing was written to {temporary}, which was to become {final}. Write to that path.")
    sync_tree(temporary)


def _put_in_place(temporary: Path, final: Path, overwrite: bool) -> None:
    if not overwrite:
        try:
            rename_without_replacing(temporary, final)
        except FileExistsError as error:
            raise _conflict(final) from error
    elif temporary.is_dir():
        _replace_folder(temporary, final)
    else:
        os.replace(temporary, final)
    sync_path(final.parent)
    discard(temporary)  # by now the folder that was replaced, if any


def _replace_folder(temporary: Path, final: Path) -> None:
    """Give something its name while a folder may have it, which no ordinary rename does in one step."""
    for attempts_left in reversed(range(8)):
        try:
            if not os.path.lexists(final):
                rename_without_replacing(temporary, final)
            elif not exchange(temporary, final):
                _move_aside_and_replace(temporary, final)
            return
        except OSError as error:  # another writer may have come between the question and the answer
            if error.errno not in _RACED or not attempts_left:
                raise


def _move_aside_and_replace(temporary: Path, final: Path) -> None:
    aside = name_beside(final, "old")
    os.rename(final, aside)
    try:
        os.rename(temporary, final)
    except BaseException:
        os.rename(aside, final)
        raise
    sync_path(final.parent)
    discard(aside)


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


T = TypeVar("T")


def write_on_rank_zero(
    path: str | os.PathLike[str], write: Callable[[Path], object], ranks: Ranks, *, overwrite: bool = True
) -> None:
    """Let rank 0 write a file, whole or not at all; when this returns it is there. Every rank must call this.

    Args:
        path: The file.
        write: Called on rank 0, with the temporary path to write to.
        ranks: Who takes part.
        overwrite: Whether something that has this name may be replaced.

    Raises:
        CheckpointError: On all ranks, if rank 0 cannot write, or takes too long. What was there before is untouched.
    """
    final = Path(os.path.abspath(path))
    temporary = name_beside(final)

    def begin() -> None:
        if ranks.rank == 0:
            write_beside(temporary, final, write, overwrite=overwrite)

    def commit(done: list[T]) -> list[T]:
        put_in_place(temporary, final, overwrite=overwrite)
        return done

    with ExitStack() as undo:
        if ranks.rank == 0:
            undo.callback(discard, temporary)
        # Apart, so that a write that was given up never becomes a checkpoint.
        ranks.exchange(begin, commit)


_LONGEST_TEXT_BYTES = 4096
_NO_SYMLINKS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


def replace_pointer(link: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Let a link point to a checkpoint, in one step: who reads meanwhile sees the old target or the new one.

    The link is relative, so that the folder may be moved as a whole. On a file system without links it is a text
    file with the relative path, which `read_pointer` reads alike.

    Args:
        link: The name of the link. A link or file that has it is replaced.
        target: The file or folder to point to, as the caller would open it.

    Raises:
        CheckpointConflictError: If `link` is the name of a folder, or that of the target.
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
    temporary = name_beside(link)
    try:
        make_folders(link.parent)
        _write(temporary, os.path.relpath(os.path.abspath(target), link.parent))
        os.replace(temporary, link)
        sync_path(link.parent)
    except OSError as error:
        if os.path.lexists(temporary):
            temporary.unlink()
        raise as_storage_error(error, link) or error from error


def refuse_folder(link: str | os.PathLike[str]) -> None:
    """Raise if the name of a link is that of a folder.

    Raises:
        CheckpointConflictError: If it is.
    """
    if is_folder(Path(link)):
        raise CheckpointConflictError(
            f"{os.fspath(link)} is a folder, so that no link to the latest checkpoint can have this name. Move it "
            f"away, or choose another name for the link."
        )


def read_pointer(link: str | os.PathLike[str]) -> Path | None:
    """Return what a pointer points to, or `None` if `link` is no pointer.

    Args:
        link: A symbolic link, whose target need not exist; or a text file such as `replace_pointer` makes where there
            are no links, which is told from other short files by naming what is beside it.
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
    """Return the path in a pointer's text, such as a `.symlink` object of a remote store.

    Args:
        content: All of the pointer's bytes.
        name: What it is called, for the error.

    Raises:
        CorruptCheckpointError: If it is empty, long, not text, or of several lines.

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


def _write(temporary: Path, text: str) -> None:
    try:
        os.symlink(text, temporary)
    except OSError as error:
        if error.errno not in _NO_SYMLINKS:
            raise
        temporary.write_text(text)  # where that is not permitted either, this says so
        sync_path(temporary)
