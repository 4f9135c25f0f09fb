"""Getting a file to the disk while it is still being written, so that little is left to wait for at the end."""

import ctypes
import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, BinaryIO

from composer_checkpoint.hashing import Hasher

__all__ = ["FlushedFile"]

# Large enough that asking the disk costs nothing. Linux keeps what is written at once in as large a run of memory as it
# can; above 2 MiB it must clear such runs first now and then, and a save took up to three times as long.
_PIECE_BYTES = 2 << 20
# Hashing fewer takes no longer than waking a thread for it.
_THREAD_BYTES = 256 << 10
_SYNC_FILE_RANGE_WRITE = 2


class FlushedFile:
    """Writes to an unbuffered file, and has the system begin with the disk's part after each few megabytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._begun = 0
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self.position = 0

    def write(self, data: memoryview, hasher: Hasher | None = None) -> None:
        """Append all of the data, which may be hashed meanwhile."""
        hashing: Future[Any] | None = None
        if hasher is not None and len(data) >= _THREAD_BYTES:
            hashing = self._hashing.submit(hasher.update, data)
        elif hasher is not None:
            hasher.update(data)
        try:
            self._append(data)
        finally:  # the data may be gone once this returns
            if hashing is not None:
                hashing.result()

    def _append(self, data: memoryview) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            self.position += len(piece)
            while piece:
                piece = piece[self._file.write(piece) :]
            if self.position - self._begun >= _PIECE_BYTES:
                _begin_flush(self._file.fileno(), self._begun, self.position)
                self._begun = self.position

    def rewrite(self, data: memoryview, position: int) -> None:
        """Write over bytes that are there."""
        self._file.seek(position)
        while data:
            data = data[self._file.write(data) :]

    def finish(self) -> None:
        """Wait until all is on the disk."""
        self._hashing.shutdown()
        os.fsync(self._file.fileno())


def _begin_flush(descriptor: int, start: int, end: int) -> None:
    # A hint: what fails to be written is told by fsync. POSIX_FADV_DONTNEED, which Python has, begins to write as well,
    # but then waits for each processor to give up its list of new pages, which costs more than is gained.
    call = _find_sync_file_range()
    if call is not None:
        call(descriptor, start, end - start, _SYNC_FILE_RANGE_WRITE)


@cache
def _find_sync_file_range() -> Any:
    """Return the C library's function, or None where it has none: it is Linux's own."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call
