"""A mapped file whose pages are fetched before they are looked at, so that what cannot be read is no signal.

Whoever looks at a page of a mapping that the disk cannot deliver, or that is gone because the file was cut short, is
ended by SIGBUS. Linux from 5.14 on can be asked to fetch pages, and says so where it cannot.
"""

import ctypes
import functools
import mmap
import os
from typing import Any

import numpy as np

from composer_checkpoint._file_reader import FileReader

__all__ = ["MappedFile"]

_MADV_POPULATE_READ = 22  # mmap has the name in Python 3.14
_RWF_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # of Linux


class MappedFile:
    """The bytes of an open file where the system keeps them, without a copy."""

    def __init__(self, file: FileReader) -> None:
        # The mapping goes with this object and the last of its pieces.
        self._view = memoryview(mmap.mmap(file.descriptor, file.size_bytes, access=mmap.ACCESS_READ))
        self._address: int = np.frombuffer(self._view, np.uint8).ctypes.data
        self._descriptor = file.descriptor
        self._is_cached = True

    def piece(self, offset: int, size_bytes: int) -> memoryview | None:
        """Return a stretch that is in memory, or `None` for one that must be read, if only to learn what is wrong."""
        # After the first piece that is not there, all is read: asking on would break up the system's reading ahead.
        self._is_cached = self._is_cached and self._is_in_memory(offset + size_bytes - 1)
        if not self._is_cached:
            return None
        first_page = offset // mmap.PAGESIZE * mmap.PAGESIZE
        # The mmap module's own madvise would hold up all other threads while the disk is read.
        failed = _madvise()(self._address + first_page, offset + size_bytes - first_page, _MADV_POPULATE_READ)
        return None if failed else self._view[offset : offset + size_bytes]

    def _is_in_memory(self, offset: int) -> bool:
        """Return whether the disk is not needed for a byte; where it is, reading is faster than faulting pages in."""
        if _RWF_NOWAIT is None:
            return False
        try:
            return os.preadv(self._descriptor, [bytearray(1)], offset, _RWF_NOWAIT) == 1
        except OSError:  # EAGAIN if it is needed, EOPNOTSUPP where the file system cannot tell
            return False


@functools.cache
def _madvise() -> Any:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise
