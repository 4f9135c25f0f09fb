"""The hashes by which a checkpoint's bytes are recognised.

XXH3 is as fast as memory can be read, so that verifying costs next to nothing. It shows damage, not forgery; neither
would a stronger hash that lies beside its data, since whoever changes the one can change the other. BLAKE3 is for those
who keep the manifest, or a file's hash, in a place of its own.
"""

import mmap
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from blake3 import blake3
from xxhash import xxh3_128

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "HASH_NAME",
    "NUM_DIGITS",
    "Hasher",
    "check_hash_name",
    "hash_bytes",
    "hash_file",
    "hash_tensor",
    "hash_tensors",
    "new_hasher",
    "tensor_bytes",
]

HASH_NAME = "xxh3_128"
"""The hash of each tensor, unless another one is asked for."""

NUM_DIGITS: Mapping[str, int] = {"xxh3_128": 32, "blake3": 64}

_HASHERS: Mapping[str, Callable[[], "Hasher"]] = {"xxh3_128": xxh3_128, "blake3": blake3}
_PIECE_BYTES = 1 << 20

_Buffer = bytes | bytearray | memoryview | mmap.mmap


class Hasher(Protocol):
    """A hash that grows with its bytes; other threads run while it does."""

    def update(self, data: Any, /) -> Any:
        """Add bytes."""
        ...

    def hexdigest(self) -> str:
        """Return the hash of all bytes so far."""
        ...


def check_hash_name(hash_name: str) -> None:
    """Raise a `ValueError` if there is no such hash."""
    if hash_name not in _HASHERS:
        raise ValueError(f"hash_name={hash_name!r} is no hash of a manifest. Pass one of {', '.join(_HASHERS)}.")


def new_hasher(hash_name: str = HASH_NAME) -> Hasher:
    """Return the hash of no bytes yet."""
    check_hash_name(hash_name)
    return _HASHERS[hash_name]()


def hash_bytes(buffer: _Buffer, hash_name: str = HASH_NAME) -> str:
    """Return the hash of bytes, in hexadecimal digits.

    Args:
        buffer: The bytes.
        hash_name: `'xxh3_128'` (32 digits) or `'blake3'` (64 digits).

    Raises:
        ValueError: If there is no such hash.

    Example:
        >>> hash_bytes(b"")
        '99aa06d3014798d86001c324468d497f'
    """
    hasher = new_hasher(hash_name)
    hasher.update(buffer)
    return hasher.hexdigest()


def hash_file(path: str | os.PathLike[str], hash_name: str = HASH_NAME) -> str:
    """Return the hash of a whole file; the names are those of `hash_bytes`."""
    if hash_name == "blake3":  # slow enough that all cores are worth their start
        return blake3(max_threads=blake3.AUTO).update_mmap(Path(path)).hexdigest()
    hasher = new_hasher(hash_name)
    piece = memoryview(bytearray(_PIECE_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(piece):
            hasher.update(piece[:count])
    return hasher.hexdigest()


def hash_tensor(tensor: "Tensor", hash_name: str = HASH_NAME) -> str:
    """Return the hash of a tensor's elements in row-major order, without its dtype and shape."""
    return hash_bytes(tensor_bytes(tensor), hash_name)


def hash_tensors(tensors: "Mapping[str, Tensor]") -> dict[str, str]:
    """Return the hash of each tensor, several tensors at a time."""
    with ThreadPoolExecutor(thread_name_prefix="hash") as pool:
        return dict(zip(tensors, pool.map(hash_tensor, tensors.values()), strict=True))


def tensor_bytes(tensor: "Tensor") -> memoryview:
    """Return a dense tensor's elements in row-major order as bytes; those of the tensor itself where it has them so."""
    import torch  # here, so that hashing files does not load it

    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(
            f"a tensor of layout {tensor.layout} has no bytes in row-major order to hash. Pass its dense parts, such "
            f"as tensor.indices() and tensor.values()."
        )
    plain: Any = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy())
