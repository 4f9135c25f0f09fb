"""What can be wrong with a checkpoint, one class for each kind of fault."""

import errno
import os
import pickle
import re
import shutil
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
    "shown",
]

# What a file holds goes into messages, and they go into logs.
_MAX_MESSAGE_CHARS = 10_000


class CheckpointError(Exception):
    """A checkpoint could not be saved or loaded. All other errors of this package are kinds of it."""

    def __str__(self) -> str:
        # A KeyError would show a message as a key, in quotes.
        message = Exception.__str__(self) if isinstance(self, KeyError) else super().__str__()
        if len(message) <= _MAX_MESSAGE_CHARS:
            return message
        half = _MAX_MESSAGE_CHARS // 2
        return f"{message[:half]} [... {len(message) - 2 * half} characters ...] {message[-half:]}"


class CorruptCheckpointError(CheckpointError):
    """The bytes are not those that were written: cut short, changed, or never a checkpoint."""


class UnsafeCheckpointError(CheckpointError, pickle.UnpicklingError):
    """The file asks for something that a checkpoint must not do; nothing of it was run."""


class IncompatibleCheckpointError(CheckpointError):
    """The checkpoint is whole, but of a newer format or of another model."""


class NewerCheckpointError(IncompatibleCheckpointError):
    """The checkpoint is of a newer format than this release reads."""


class UnfittingWeightsError(IncompatibleCheckpointError, RuntimeError):
    """The weights are not those of the model, as far as it says so before any is changed."""


class UnfittingOptimizerError(IncompatibleCheckpointError, KeyError):
    """The optimizer's state is of other parameters than are optimized now; nothing was changed."""


class StorageError(CheckpointError, OSError):
    """A disk or a remote store failed."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one was looked for."""


class CheckpointConflictError(CheckpointError, FileExistsError):
    """Something that must not be overwritten is in the way."""


_MAX_SHOWN_CHARS = 80
_MAX_SHOWN_ITEMS = 8
_MAX_SHOWN_BITS = 1 << 10  # Python refuses to write out numbers of more than 4300 digits


def shown(value: Any) -> str:
    """Return how a message shows what a pickle made, without following it: it may unfold to far more than the pickle.

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


_ADVICE = {
    errno.ENOSPC: "Make room or save elsewhere",
    errno.EDQUOT: "Make room within your quota or save elsewhere",
    errno.EFBIG: "Raise the file-size limit (ulimit -f), save in shards, or save elsewhere",
    errno.EROFS: "Mount it writable or save elsewhere",
    errno.EACCES: "Give this user the right to write there or save elsewhere",
    errno.EPERM: "Give this user the right to write there or save elsewhere",
    errno.EIO: "Look after the disk and save elsewhere",
    errno.ESTALE: "Mount the file system anew or save elsewhere",
}
# torch's archive writer loses the number: the system's answer is a RuntimeError by then.
_TORCH_WRITER = re.compile("PytorchStreamWriter failed|file write failed|iostream error")
# The Rust libraries (safetensors) put it into the text.
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")


def as_storage_error(error: BaseException, path: Path, need_bytes: int | None = None) -> StorageError | None:
    """Return the error as one of storage, with the free space and the need, or `None` if it is something else.

    Args:
        error: What was raised while something was written.
        path: What was to be written.
        need_bytes: How large it is, as far as known.
    """
    code = _error_number(error)
    if code is None:
        return None
    free = free_bytes(path)
    space = "unknown" if free is None else f"{free} bytes"
    need = "unknown" if need_bytes is None else f"{need_bytes} bytes"
    reason = os.strerror(code) if code else str(error).strip().splitlines()[0]
    message = (
        f"{path} could not be written: {reason}. Free space: {space}; needed: {need}. Nothing of it is left, and what "
        f"was there before is untouched. {_ADVICE.get(code, _ADVICE[errno.ENOSPC])}."
    )
    return StorageError(code, message) if code else StorageError(message)


def require_space(path: Path, need_bytes: int) -> None:
    """Raise before anything is written if it cannot fit.

    Raises:
        StorageError: If the free space is known and less than `need_bytes`.
    """
    free = free_bytes(path)
    if free is not None and free < need_bytes:
        error = as_storage_error(OSError(errno.ENOSPC, "no space"), path, need_bytes)
        assert error is not None
        raise error


def free_bytes(path: Path) -> int | None:
    """Return how much this user may still write where the path is or will be, or `None` where that is unknown."""
    for folder in (path, *path.parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return None


def _error_number(error: BaseException) -> int | None:
    """Return the system's number, 0 for a failed write without one, None for what is no fault of storage."""
    if isinstance(error, OSError):
        return error.errno if error.errno in _ADVICE else None
    if not isinstance(error, Exception):
        return None
    if found := _RUST_ERROR.search(str(error)):
        return int(found[1]) if int(found[1]) in _ADVICE else None
    return 0 if isinstance(error, RuntimeError) and _TORCH_WRITER.search(str(error)) else None
