"""A file to which bytes are appended and of which none is lost: what the disk refuses is offered again."""

import io
import os
from multiprocessing.util import Finalize
from pathlib import Path

from composer.loggers._service_queue import warn_of_trouble

__all__ = ["KeptFile"]


class KeptFile:
    """Append to a file.

    When writing fails, as on a full disk, the first time warns, and what is to be written stays in memory until it
    succeeds.

    Args:
        path: Where it is.
        buffer_size: How many bytes are gathered before they are written; less than 0 for the system's usual number.
        is_continued: Whether what is there already stays.
    """

    def __init__(self, path: Path, buffer_size: int, is_continued: bool) -> None:
        self.path = path
        self._file = path.open("ab" if is_continued else "wb", buffering=0)
        self._gathered = bytearray()
        self._buffer_size = io.DEFAULT_BUFFER_SIZE if buffer_size < 0 else buffer_size
        self._has_warned = self._is_in_child = False

    def write(self, text: bytes) -> None:
        """Append."""
        self._gathered += text
        if self._is_in_child:
            self._offer(max(self._gathered.rfind(b"\n"), self._gathered.rfind(b"\r")) + 1)
        elif len(self._gathered) >= self._buffer_size:
            self._offer()

    def begin_in_child(self) -> None:
        """Leave what was gathered to the parent of a forked process, and write each line when it is whole.

        Others write to the file at the same time, and nobody closes this copy.
        """
        self._gathered.clear()
        self._is_in_child = True
        # A child ends without the hooks of `atexit`; what is left then is a line without an end.
        Finalize(None, self.flush, exitpriority=0)

    def flush(self) -> None:
        """Append what was gathered."""
        self._offer()

    def sync(self) -> None:
        """Append what was gathered, and wait until it is on the disk."""
        try:
            if self._offer():
                os.fsync(self._file.fileno())
        except OSError as error:  # pipes and some file systems cannot
            self._warn(error)

    def close(self) -> None:
        """Let go of the file; what still cannot be written is lost, with a warning that says how much."""
        num_lost = 0 if self._offer() else len(self._gathered)
        self._file.close()
        if num_lost:
            warn_of_trouble(
                f"The last {num_lost} bytes of the log are not in {str(self.path)!r}: it could not be written to."
            )

    def _offer(self, size: int | None = None) -> bool:
        """Write what was gathered, or as many bytes of it, and say whether nothing is left."""
        left = len(self._gathered) if size is None else size
        try:
            while left:
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
        warn_of_trouble(
            f"{str(self.path)!r} cannot be written to at the moment, and training goes on: {error}. What is logged is "
            f"kept in memory and written as soon as it can be."
        )
