"""Getting a file to the disk while it is still being written, so that little is left to wait for at the end."""

import os
from contextlib import suppress
from typing import BinaryIO

from composer_checkpoint.hashing import Hasher

__all__ = ["FlushedFile"]

# Small enough that the disk has work at once, large enough that asking it costs nothing.
_PIECE_BYTES = 8 << 20


class FlushedFile:
    """Writes to an unbuffered file, and has the system begin with the disk's part after each few megabytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._begun = 0
        self.position = 0

    def write(self, data: memoryview, hasher: Hasher | None = None) -> None:
        """Append all of the data, which may be hashed on the way."""
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            if hasher is not None:
                hasher.update(piece)
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
        os.fsync(self._file.fileno())


def _begin_flush(descriptor: int, start: int, end: int) -> None:
    # Linux begins to write what it is told to forget, and does not wait; since none of it is on the disk yet, nothing
    # is forgotten. sync_file_range is as fast and would say what is meant, but Python does not have it, and fdatasync
    # waits for the disk's own cache each time.
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # a hint; what fails to be written is told by fsync
            os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
