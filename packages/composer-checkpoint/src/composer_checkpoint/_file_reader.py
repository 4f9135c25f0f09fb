"""A file that is read by position, whose every short read is an error with the file's name."""

import os
import stat
from types import TracebackType

from composer_checkpoint.errors import CorruptCheckpointError, NoCheckpointError

__all__ = ["FileReader"]


class FileReader:
    """An open file; several threads may read it at once.

    Reading copies into memory that was asked for, and fails with an error. `MappedFile` does without the copy.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            status = os.stat(self.path)
        except FileNotFoundError as error:
            raise NoCheckpointError(f"there is no checkpoint at {self.path!r}. Check the path.") from error
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for who writes into it
            raise CorruptCheckpointError(f"{self.path!r} is not a file. Pass the path of one.")
        self.descriptor = os.open(self.path, os.O_RDONLY)
        self.size_bytes = os.fstat(self.descriptor).st_size
        if not self.size_bytes:
            os.close(self.descriptor)
            raise CorruptCheckpointError(
                f"{self.path!r} is empty, so it was never written to the end. Load another checkpoint."
            )

    @property
    def own_path(self) -> str:
        """Return a path to this very file, for those who open it by its name, which another file may get meanwhile."""
        linked = f"/proc/self/fd/{self.descriptor}"
        if os.path.exists(linked):  # on Linux
            return linked
        named, opened = os.stat(self.path), os.fstat(self.descriptor)
        if (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino):
            raise CorruptCheckpointError(f"{self.path!r} was replaced while it was read. Load it again.")
        return self.path

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return exactly that many bytes.

        Raises:
            CorruptCheckpointError: If the file does not have them.
        """
        if offset < 0 or size_bytes < 0 or offset + size_bytes > self.size_bytes:
            raise CorruptCheckpointError(
                f"bytes {offset} to {offset + size_bytes} were expected, and the file has {self.size_bytes}: it was "
                f"cut short or damaged. Load another checkpoint."
            )
        found = os.pread(self.descriptor, size_bytes, offset)
        if len(found) == size_bytes:
            return found
        buffer = bytearray(size_bytes)  # the system reads at most 2 GiB at a time
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer from a position on."""
        filled = 0
        while filled < len(buffer):
            count = os.preadv(self.descriptor, [buffer[filled:]], offset + filled)
            if count == 0:
                raise CorruptCheckpointError(
                    f"the file ends at byte {offset + filled}, and {len(buffer) - filled} more were expected: it was "
                    f"cut short while it was read. Load another checkpoint."
                )
            filled += count

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)

    def __enter__(self) -> "FileReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
