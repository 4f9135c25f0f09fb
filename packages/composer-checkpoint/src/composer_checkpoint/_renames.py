"""The two renames of Linux that Python does not have: swap two names, and never replace."""

import ctypes
import errno
import os
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["exchange", "rename_without_replacing"]

_AT_FDCWD, _NOREPLACE, _EXCHANGE = -100, 1, 2
# What kernels and file systems answer that do not know the call or the flag.
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def exchange(one: Path, other: Path) -> bool:
    """Let two names change places in one step, so that neither is ever missing.

    Returns:
        Whether that was done. `False` where the system or the file system cannot.

    Raises:
        OSError: If it can and something else is wrong, such as a missing file.
    """
    return _renameat2(one, other, _EXCHANGE)


def rename_without_replacing(source: Path, target: Path) -> None:
    """Rename a file or folder unless the target exists.

    Raises:
        FileExistsError: If it does.
    """
    if _renameat2(source, target, _NOREPLACE):
        return
    if not source.is_dir():
        try:
            os.link(source, target)  # fails where the target exists, in one step
        except OSError as error:
            if error.errno not in {errno.EPERM, *_UNSUPPORTED}:  # EPERM: a file system without hard links
                raise
        else:
            os.unlink(source)
            return
    # Two steps, so that a second writer could come between them; this file system offers nothing better.
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    os.rename(source, target)


def _renameat2(one: Path, other: Path, flag: int) -> bool:
    call = _find_renameat2()
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


@cache
def _find_renameat2() -> Any:
    """Return the C library's function, or None where it has none (macOS, musl, glibc before 2.28)."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return call
