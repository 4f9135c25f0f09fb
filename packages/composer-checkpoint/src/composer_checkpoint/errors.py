"""Errors of checkpoints, one class for each kind of fault."""

import errno
import os
import pickle
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "CheckpointError",
    "CorruptCheckpointError",
    "UnsafeCheckpointError",
    "IncompatibleCheckpointError",
    "NewerCheckpointError",
    "UnfittingOptimizerError",
    "UnfittingWeightsError",
    "StorageError",
    "NoCheckpointError",
    "CheckpointConflictError",
]

# Messages include content of files, which may be of any size, and end up in logs.
_MAX_MESSAGE_CHARS = 10_000


class CheckpointError(Exception):
    """Raised if a checkpoint cannot be saved or loaded. Base class of all errors of this package."""

    def __str__(self) -> str:
        # str() of a KeyError is the repr of its message.
        message = Exception.__str__(self) if isinstance(self, KeyError) else super().__str__()
        if len(message) <= _MAX_MESSAGE_CHARS:
            return message
        half = _MAX_MESSAGE_CHARS // 2
        return f"{message[:half]} [... {len(message) - 2 * half} characters ...] {message[-half:]}"


class CorruptCheckpointError(CheckpointError):
    """Raised if a file was cut short or changed, or never was a checkpoint."""


class UnsafeCheckpointError(CheckpointError, pickle.UnpicklingError):
    """Raised if loading a file would run code, or build more than data; nothing in the file was run.

    It is an `UnpicklingError`, as `torch.load(weights_only=True)` raises.
    """


class IncompatibleCheckpointError(CheckpointError):
    """Raised if a checkpoint is intact, but has a newer format or is of another model."""


class NewerCheckpointError(IncompatibleCheckpointError):
    """Raised if a checkpoint has a newer format than this release reads."""


class UnfittingWeightsError(IncompatibleCheckpointError, RuntimeError):
    """Raised if the weights differ from those of the model in name or shape, before any is changed."""


class UnfittingOptimizerError(IncompatibleCheckpointError, KeyError):
    """Raised if an optimizer's state has other parameters than the optimizer; nothing was changed."""


class StorageError(CheckpointError, OSError):
    """Raised if a disk or a remote store fails."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """Raised if a checkpoint does not exist."""


class CheckpointConflictError(CheckpointError, FileExistsError):
    """Raised if a file or folder exists and must not be overwritten."""


_MAX_SHOWN_CHARS = 80
_MAX_SHOWN_ITEMS = 8
_MAX_SHOWN_BITS = 1 << 10  # Python refuses to convert numbers of more than 4300 digits to text


def shown(value: Any) -> str:
    """Return a short text for an object from a pickle, without descending into it, since it may unfold to any size.

    Example:
        >>> shown(("storage", 3, [[]]))
        "('storage', 3, a list)"
    """
    if type(value) is not tuple:
        return _shown_item(value)
    more = ", ..." if len(value) > _MAX_SHOWN_ITEMS else "," if len(value) == 1 else ""
    return f"({', '.join(map(_shown_item, value[:_MAX_SHOWN_ITEMS]))}{more})"


def _shown_item(value: Any) -> str:
    if type(value) in (str, bytes):
        return repr(value[:_MAX_SHOWN_CHARS])
    if type(value) is int and value.bit_length() > _MAX_SHOWN_BITS:
        return f"a number of {value.bit_length()} bits"
    return repr(value) if value is None or type(value) in (bool, int, float) else f"a {type(value).__name__}"


def first_few(names: Iterable[object], most: int = 10) -> str:
    """Return names for a message, separated by commas, and an ellipsis if there are more."""
    texts = list(map(str, names))
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")


_ADVICE = {
    errno.ENOSPC: "Make room or save elsewhere",
    errno.EDQUOT: "Make room within your quota or save elsewhere",
    errno.EFBIG: "Raise the file-size limit (ulimit -f), save in shards, or save elsewhere",
    errno.EROFS: "Mount it writable or save elsewhere",
    errno.EACCES: "Give this user the right to write there or save elsewhere",
    errno.EPERM: "Give this user the right to write there or save elsewhere",
    errno.EIO: "Check the disk, and save elsewhere",
    errno.ESTALE: "Remount the file system or save elsewhere",
}
# torch's archive writer raises a RuntimeError without the error number of the system.
_TORCH_WRITER = re.compile("PytorchStreamWriter failed|file write failed|iostream error")
# Rust libraries (safetensors) include the number in the text.
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")


def as_storage_error(error: BaseException, path: Path, need_bytes: int | None = None) -> StorageError | None:
    """Convert an error of a disk to a `StorageError` with the free and the needed space; return `None` for others."""
    code: int | None = None
    if isinstance(error, OSError):
        code = error.errno or None
    elif isinstance(error, Exception) and (found := _RUST_ERROR.search(str(error))):
        code = int(found[1])
    elif isinstance(error, RuntimeError) and _TORCH_WRITER.search(str(error)):
        code = 0  # without a number
    if code is None or (code and code not in _ADVICE):
        return None
    free = free_bytes(path)
    space = "unknown" if free is None else f"{free} bytes"
    need = "unknown" if need_bytes is None else f"{need_bytes} bytes"
    reason = os.strerror(code) if code else str(error).strip().splitlines()[0]
    message = (
        f"{path} could not be written: {reason}. Free space: {space}; needed: {need}. Nothing of it is left, and what "
        f"was there before is unchanged. {_ADVICE.get(code, _ADVICE[errno.ENOSPC])}."
    )
    return StorageError(code, message) if code else StorageError(message)


def free_bytes(path: Path) -> int | None:
    """Return the bytes that this user may still write at a path, which need not exist; `None` if unknown."""
    for folder in (path, *path.parents):  # the nearest folder that exists
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return None
