"""Append-only file that retries failed writes later."""

import io
import os
from multiprocessing.util import Finalize
from pathlib import Path

from composer.loggers._service_queue import warn_logging_problem

__all__ = ["KeptFile"]


class KeptFile:
    """File for appending.

    The first failed write, for example on a full disk, causes a warning. The bytes stay in memory until a write
    succeeds.

    Args:
        path: The path of the file.
        buffer_size: The number of bytes to buffer; less than 0 for the default of the system.
        is_continued: Whether to append to an existing file.
    """

    def __init__(self, path: Path, buffer_size: int, is_continued: bool) -> None:
        self.path = path
        # Unbuffered: with Python's own buffer, it is unknown after a failed write which bytes are in the file.
        self._file = path.open("ab" if is_continued else "wb", buffering=0)
        self._gathered = bytearray()
        self._buffer_size = io.DEFAULT_BUFFER_SIZE if buffer_size < 0 else buffer_size
        self._has_warned = self._is_in_child = False

    def write(self, text: bytes) -> None:
        """Append bytes."""
        self._gathered += text
        if self._is_in_child:
            # Only up to the last line end; progress bars end their lines with a carriage return.
            self._offer(max(self._gathered.rfind(b"\n"), self._gathered.rfind(b"\r")) + 1)
        elif len(self._gathered) >= self._buffer_size:
            self._offer()

    def begin_in_child(self) -> None:
        """Drop the parent's buffer in a forked process, and write whole lines only.

        Parent and child write to the same file, and this copy is never closed.
        """
        self._gathered.clear()
        self._is_in_child = True
        # Children of multiprocessing skip `atexit`; this flushes a last line without a line end.
        Finalize(None, self.flush, exitpriority=0)

    def flush(self) -> None:
        """Write the buffer."""
        self._offer()

    def sync(self) -> None:
        """Write the buffer, and sync the file to the disk."""
        try:
            if self._offer():
                os.fsync(self._file.fileno())
        except OSError as error:  # pipes and some file systems do not support fsync
            self._warn(error)

    def close(self) -> None:
        """Close the file. Bytes that still cannot be written are lost, with a warning."""
        num_lost = 0 if self._offer() else len(self._gathered)
        self._file.close()
        if num_lost:
            warn_logging_problem(
                f"The last {num_lost} bytes of the log are not in {str(self.path)!r}: it could not be written to."
            )

    def _offer(self, size: int | None = None) -> bool:
        """Write the buffer, or its first `size` bytes, and return whether it is empty."""
        left = len(self._gathered) if size is None else size
        try:
            while left:  # an unbuffered write may write fewer bytes
                written = self._file.write(self._gathered[:left])
                del self._gathered[:written]
                left -= written
        except OSError as error:
            self._warn(error)
        return not self._gathered

    def _warn(self, error: OSError) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warn_logging_problem(
            f"{str(self.path)!r} cannot be written to now; training continues: {error}. Logged lines are "
            f"kept in memory and written later."
        )
