"""The hash by which a checkpoint's bytes are recognised: BLAKE3, on all cores."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HASH_NAME", "hash_bytes", "hash_file", "hash_tensor", "hash_tensors", "tensor_bytes"]

HASH_NAME = "blake3"

# Below this many bytes the start of a second thread costs more than it saves.
PARALLEL_FROM_BYTES = 1 << 20


def hash_bytes(buffer: bytes | bytearray | memoryview | mmap) -> str:
    """Return the hash of bytes, as 64 hexadecimal digits.

    Example:
        >>> hash_bytes(b"")[:16]
        'af1349b9f5f9a1a6'
    """
    size_bytes = memoryview(buffer).nbytes
    return blake3(buffer, max_threads=blake3.AUTO if size_bytes >= PARALLEL_FROM_BYTES else 1).hexdigest()


def hash_file(path: str | os.PathLike[str]) -> str:
    """Return the hash of a whole file, which is mapped rather than read."""
    return blake3(max_threads=blake3.AUTO).update_mmap(Path(path)).hexdigest()


def hash_tensor(tensor: "Tensor") -> str:
    """Return the hash of a tensor's elements in row-major order, without its dtype and shape."""
    return hash_bytes(tensor_bytes(tensor))


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
