"""Hashes of stretches of a file, by several threads, in little memory."""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from blake3 import blake3

from composer_checkpoint._file_reader import FileReader

__all__ = ["hash_ranges", "num_threads"]

# Small enough to stay in the core's cache between being read and being hashed.
_PIECE_BYTES = 1 << 20
# One thread cannot keep up with a fast disk, so a long stretch is hashed by all of them together.
_LONG_BYTES = 256 << 20
_LONG_PIECE_BYTES = 16 << 20

_buffers = threading.local()


def num_threads() -> int:
    """Return how many threads work at a time: one for each core that this process may use, up to eight."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 8)


def hash_ranges(file: FileReader, ranges: Sequence[tuple[int, int]]) -> list[str]:
    """Return the hash of each stretch, given as its start and its size.

    Raises:
        CorruptCheckpointError: If the file is too short.
    """
    with ThreadPoolExecutor(num_threads(), thread_name_prefix="hash") as pool:
        futures = [pool.submit(_hash_range, file, *stretch) for stretch in ranges if stretch[1] < _LONG_BYTES]
        short = iter(futures)
        return [
            _hash_long_range(file, *stretch) if stretch[1] >= _LONG_BYTES else next(short).result()
            for stretch in ranges
        ]


def _hash_range(file: FileReader, start: int, size_bytes: int) -> str:
    buffer: memoryview | None = getattr(_buffers, "piece", None)
    if buffer is None:
        buffer = _buffers.piece = memoryview(bytearray(_PIECE_BYTES))
    return _hash_pieces(file, start, size_bytes, buffer, 1)


def _hash_long_range(file: FileReader, start: int, size_bytes: int) -> str:
    return _hash_pieces(file, start, size_bytes, memoryview(bytearray(_LONG_PIECE_BYTES)), blake3.AUTO)


def _hash_pieces(file: FileReader, start: int, size_bytes: int, buffer: memoryview, max_threads: int) -> str:
    hasher = blake3(max_threads=max_threads)
    for position in range(start, start + size_bytes, len(buffer)):
        piece = buffer[: min(len(buffer), start + size_bytes - position)]
        file.read_into(piece, position)
        hasher.update(piece)
    return hasher.hexdigest()
