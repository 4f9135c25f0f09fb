"""The name `latest`, which points to a checkpoint and always to a whole one."""

import errno
import os
from pathlib import Path

from composer_checkpoint._durability import make_folders, sync_path
from composer_checkpoint._leftovers import is_folder
from composer_checkpoint._storage_faults import as_storage_error
from composer_checkpoint._unfinished_names import name_beside
from composer_checkpoint.errors import CheckpointConflictError, CorruptCheckpointError

__all__ = ["read_pointer", "read_pointer_text", "refuse_folder", "replace_pointer"]

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
