"""The one call that composer-checkpoint makes of the library `xxhash`, with the hash of BLAKE2, which takes longer."""

import hashlib
from typing import Any


class xxh3_128:  # the library's name
    """A hash of 32 hexadecimal digits."""

    def __init__(self, data: Any = b"") -> None:
        self._hash = hashlib.blake2b(data, digest_size=16)

    def update(self, data: Any) -> None:
        """Add bytes."""
        self._hash.update(data)

    def hexdigest(self) -> str:
        """Return the hash of all bytes so far."""
        return self._hash.hexdigest()
