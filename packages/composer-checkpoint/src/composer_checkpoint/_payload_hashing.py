"""Hashes of stretches of a file, by several threads, in little memory."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from composer_checkpoint._file_reader import FileReader
from composer_checkpoint._mapped_file import MappedFile
from composer_checkpoint.hashing import HASH_NAME, new_hasher

__all__ = ["hash_ranges", "num_threads"]

# Small enough to stay in the core's cache between being read and being hashed.
_READ_BYTES = 1 << 20
# Nothing is copied: large enough that the threads seldom meet at the interpreter's lock.
_MAPPED_BYTES = 4 << 20

_buffers = threading.local()


def num_threads() -> int:
    """Return how many threads work at a time: one for each core that this process may use, up to eight."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 8)


def hash_ranges(
    file: FileReader,
    ranges: Sequence[tuple[int, int]],
    hash_name: str = HASH_NAME,
    *,
    mapped: MappedFile | None = None,
    look: Callable[[int, memoryview], None] | None = None,
) -> list[str]:
    """Return the hash of each stretch, given as its start and its size.

    Args:
        file: What is read.
        ranges: The stretches.
        hash_name: Which hash.
        mapped: The same file, to hash it without copying it.
        look: Is shown each piece of each stretch, with the stretch's index, while the piece is in the core's cache.

    Raises:
        CorruptCheckpointError: If the file is too short.
    """

    def hash_range(index: int) -> str:
        start, size_bytes = ranges[index]
        hasher = new_hasher(hash_name)
        position, end = start, start + size_bytes
        while position < end:
            piece = mapped and mapped.piece(position, min(_MAPPED_BYTES, end - position))
            if not piece:
                piece = _buffer()[: end - position]
                file.read_into(piece, position)
            hasher.update(piece)
            if look is not None:
                look(index, piece)
            position += len(piece)
        return hasher.hexdigest()

    hashes = [""] * len(ranges)
    left = iter(range(len(ranges)))  # shared by the threads

    def hash_what_is_left() -> None:
        for index in left:
            hashes[index] = hash_range(index)

    workers = min(num_threads(), sum(size_bytes for _, size_bytes in ranges) // _READ_BYTES)
    if workers < 2:
        hash_what_is_left()
        return hashes
    # A task for each thread, not for each stretch: there may be thousands of small ones.
    with ThreadPoolExecutor(workers, thread_name_prefix="hash") as pool:
        for task in [pool.submit(hash_what_is_left) for _ in range(workers)]:
            task.result()
    return hashes


def _buffer() -> memoryview:
    """Return this thread's memory to read into."""
    buffer: memoryview | None = getattr(_buffers, "piece", None)
    if buffer is None:
        buffer = _buffers.piece = memoryview(bytearray(_READ_BYTES))
    return buffer
