"""What a failing disk says, told to the person whose run stopped."""

import errno
import os
import re
import shutil
from pathlib import Path

from composer_checkpoint.errors import StorageError

__all__ = ["as_storage_error", "free_bytes", "require_space"]

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
