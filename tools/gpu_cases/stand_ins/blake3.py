"""The calls of the library `blake3` with the hashes of BLAKE2: for files that nobody else will read."""

import hashlib
from pathlib import Path
from typing import Any, Self


class blake3:  # the library's name
    """A hash of 64 hexadecimal digits."""

    AUTO = -1

    def __init__(self, data: Any = b"", *, max_threads: int = 1) -> None:
        self._hash = hashlib.blake2b(data, digest_size=32)

    def update(self, data: Any) -> Self:
        """Add bytes."""
        self._hash.update(data)
        return self

    def update_mmap(self, path: str | Path) -> Self:
        """Add a whole file."""
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                self._hash.update(piece)
        return self

    def hexdigest(self) -> str:
        """Return the hash of all bytes so far."""
        return self._hash.hexdigest()
