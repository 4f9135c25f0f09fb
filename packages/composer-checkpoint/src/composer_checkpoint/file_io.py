"""Hashes of tensors and files, and the reading and writing of files that are hashed and searched for NaN.

XXH3 runs at the speed of memory, so verification costs almost nothing. It detects damage, not forgery. A stronger hash
next to its data would not detect forgery either, since both could be changed together. BLAKE3 is for manifests, or
hashes of files, that are kept in a separate place.
"""

import mmap
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import CDLL, c_int, c_int64, c_size_t, c_uint, c_void_p
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from blake3 import blake3
from xxhash import xxh3_128

from composer_checkpoint._durability import c_function
from composer_checkpoint.errors import CorruptCheckpointError, NoCheckpointError

if TYPE_CHECKING:
    from torch import Tensor

HASH_NAME = "xxh3_128"
"""Default hash of each tensor."""

NUM_DIGITS: Mapping[str, int] = {"xxh3_128": 32, "blake3": 64}

_HASHERS: Mapping[str, Callable[[], Any]] = {"xxh3_128": xxh3_128, "blake3": blake3}
_PIECE_BYTES = 1 << 20

_Buffer = bytes | bytearray | memoryview | mmap.mmap


def new_hasher(hash_name: str = HASH_NAME) -> Any:
    """Return a new hasher, whose `update` releases the interpreter's lock."""
    if hash_name not in _HASHERS:
        raise ValueError(f"hash_name={hash_name!r} is not a hash of manifests. Pass one of {', '.join(_HASHERS)}.")
    return _HASHERS[hash_name]()


def hash_bytes(buffer: _Buffer, hash_name: str = HASH_NAME) -> str:
    """Return the hash of bytes, in hexadecimal digits.

    Args:
        buffer: The bytes.
        hash_name: `'xxh3_128'` (32 digits) or `'blake3'` (64 digits).

    Raises:
        ValueError: If the hash is unknown.

    Example:
        >>> hash_bytes(b"")
        '99aa06d3014798d86001c324468d497f'
    """
    hasher = new_hasher(hash_name)
    hasher.update(buffer)
    return hasher.hexdigest()


def hash_file(path: str | os.PathLike[str], hash_name: str = HASH_NAME) -> str:
    """Return the hash of a whole file; the names are those of `hash_bytes`."""
    if hash_name == "blake3":  # slow enough to be worth starting threads on all cores
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
    """Return the bytes of a dense tensor's elements in row-major order, without a copy where possible."""
    import torch  # here, so that hashing of files does not load it

    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(
            f"a tensor of layout {tensor.layout} has no bytes in row-major order to hash. Pass its dense parts, such "
            f"as tensor.indices() and tensor.values()."
        )
    # Viewed as bytes, since NumPy lacks dtypes such as bfloat16 and float8.
    plain: Any = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy())


# Large enough to make the cost of a system call negligible. Linux allocates as large a run of memory as it can for one
# write; above 2 MiB it must sometimes compact memory first, and a save took up to three times as long.
_FLUSH_BYTES = 2 << 20
# Hashing less than this takes no longer than waking a thread.
_THREAD_BYTES = 256 << 10
_SYNC_FILE_RANGE_WRITE = 2


class FlushedFile:
    """Writer to an unbuffered file that starts writeback to the disk after every few megabytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._begun = 0
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self.position = 0

    def write(self, data: memoryview, hasher: Any = None) -> None:
        """Append all of the data, while hashing it in another thread."""
        hashing: Future[Any] | None = None
        if hasher is not None and len(data) >= _THREAD_BYTES:
            hashing = self._hashing.submit(hasher.update, data)
        elif hasher is not None:
            hasher.update(data)
        try:
            for start in range(0, len(data), _FLUSH_BYTES):
                self._append(data[start : start + _FLUSH_BYTES])
        finally:  # the caller may free the data after this returns
            if hashing is not None:
                hashing.result()

    def _append(self, piece: memoryview) -> None:
        self.position += len(piece)
        while piece:
            piece = piece[self._file.write(piece) :]
        # A hint only: fsync reports failed writes. POSIX_FADV_DONTNEED, which Python offers, starts writing too, but
        # then waits for all processors to flush their lists of new pages, which costs more than it gains.
        if (length := self.position - self._begun) >= _FLUSH_BYTES:
            sync_file_range = c_function("sync_file_range", c_int, c_int64, c_int64, c_uint)
            if sync_file_range is not None:  # only Linux has it
                sync_file_range(self._file.fileno(), self._begun, length, _SYNC_FILE_RANGE_WRITE)
            self._begun = self.position

    def rewrite(self, data: memoryview, position: int) -> None:
        """Overwrite existing bytes."""
        self._file.seek(position)
        while data:
            data = data[self._file.write(data) :]

    def finish(self) -> None:
        """Wait until everything is on the disk."""
        self._hashing.shutdown()
        os.fsync(self._file.fileno())


class HashingFile:
    """File for `torch.save` that hashes each piece before writing it.

    torch writes each storage in one piece. A storage that was written in several pieces is read back to hash it.
    """

    def __init__(self, path: str, hash_name: str) -> None:
        self.raw = open(path, "w+b", buffering=0)  # noqa: SIM115  # closed by __exit__
        self._disk = FlushedFile(self.raw)
        self._hash_name = hash_name
        self._failure: OSError | None = None
        # By offset and size, since torch passes bytes without the name of the storage that they are of.
        self.hashes: dict[tuple[int, int], str] = {}

    def write(self, data: Any) -> int:
        """Write all of the data."""
        view = memoryview(data).cast("B")
        start, hasher = self._disk.position, new_hasher(self._hash_name)
        try:
            self._disk.write(view, hasher)
        except OSError as error:  # torch replaces an error of the file by one without its cause
            self._failure = self._failure or error
            raise
        self.hashes[start, len(view)] = hasher.hexdigest()
        return len(view)

    def flush(self) -> None:
        """Do nothing, since the file is unbuffered."""

    def raise_failure(self) -> None:
        """Raise the error of a failed write that torch has swallowed."""
        if self._failure is not None:
            raise self._failure

    def finish(self, end: bytes) -> None:
        """Overwrite the last bytes of the file, and wait until everything is on the disk."""
        self._disk.rewrite(memoryview(end), self.raw.seek(0, os.SEEK_END) - len(end))
        self._disk.finish()

    def __enter__(self) -> "HashingFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        self.raw.close()
        if kind is not None:
            self.raise_failure()


class FileReader:
    """Open file that several threads may read concurrently.

    Reads copy into memory, and report errors as exceptions. `MappedFile` avoids the copy.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            status = os.stat(self.path)
        except FileNotFoundError as error:
            raise NoCheckpointError(f"there is no checkpoint at {self.path!r}. Check the path.") from error
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would block until another process writes to it
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
        """Return a path of the open file for functions that need one, even if another file has taken its name."""
        linked = f"/proc/self/fd/{self.descriptor}"
        if os.path.exists(linked):  # on Linux
            return linked
        named, opened = os.stat(self.path), os.fstat(self.descriptor)
        if (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino):
            raise CorruptCheckpointError(f"{self.path!r} was replaced while it was read. Load it again.")
        return self.path

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return exactly `size_bytes` bytes."""
        if offset < 0 or size_bytes < 0 or offset + size_bytes > self.size_bytes:
            raise CorruptCheckpointError(
                f"bytes {offset} to {offset + size_bytes} were expected, and the file has {self.size_bytes}: it was "
                f"cut short or damaged. Load another checkpoint."
            )
        found = os.pread(self.descriptor, size_bytes, offset)
        if len(found) == size_bytes:
            return found
        buffer = bytearray(size_bytes)  # one call reads at most 2 GiB on Linux
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer from an offset in the file."""
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

    def __exit__(self, *_: object) -> None:
        self.close()


_MADV_POPULATE_READ = 22  # named in `mmap` since Python 3.14
_RWF_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # Linux only


class MappedFile:
    """Bytes of an open file in the system's page cache, without a copy."""

    def __init__(self, file: FileReader) -> None:
        # The mapping lives as long as this object and the views of its pieces.
        self._view = memoryview(mmap.mmap(file.descriptor, file.size_bytes, access=mmap.ACCESS_READ))
        self._address: int = np.frombuffer(self._view, np.uint8).ctypes.data
        self._descriptor = file.descriptor
        self._is_cached = True

    def piece(self, offset: int, size_bytes: int) -> memoryview | None:
        """Return a range that is in memory, or `None` for one that must be read, which also reports errors."""
        # After the first missing piece, everything is read: further queries would disturb the system's readahead.
        self._is_cached = self._is_cached and self._is_in_memory(offset + size_bytes - 1)
        if not self._is_cached:
            return None
        first_page = offset // mmap.PAGESIZE * mmap.PAGESIZE
        # Unlike an access to the mapping, which would end the process with SIGBUS, this call reports a read error.
        # madvise() of the mmap module would hold the interpreter's lock while the disk is read.
        failed = _madvise()(self._address + first_page, offset + size_bytes - first_page, _MADV_POPULATE_READ)
        return None if failed else self._view[offset : offset + size_bytes]

    def _is_in_memory(self, offset: int) -> bool:
        """Return whether a byte is in memory; if it is not, reading is faster than page faults."""
        if _RWF_NOWAIT is None:
            return False
        try:
            return os.preadv(self._descriptor, [bytearray(1)], offset, _RWF_NOWAIT) == 1
        except OSError:  # EAGAIN if it is not in memory, EOPNOTSUPP if the file system does not support the query
            return False


@cache
def _madvise() -> Any:
    madvise = CDLL(None).madvise
    madvise.argtypes = [c_void_p, c_size_t, c_int]
    return madvise


# Small enough to stay in the core's cache between reading and hashing.
_READ_BYTES = 1 << 20
# Nothing is copied: large enough that threads rarely compete for the interpreter's lock.
_MAPPED_BYTES = 4 << 20

# Each thread allocates its buffer once, not for each range.
_buffers = threading.local()


def num_threads() -> int:
    """Return the number of threads: one for each core that this process may use, up to eight."""
    # Not os.cpu_count() where avoidable: a container or a job scheduler may allow only some of the machine's cores.
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
    """Return the hash of each range of a file, given as offset and size.

    `mapped` is the same file, to hash it without copying. `look` is called with a range's index and each piece of it,
    while the piece is in the core's cache.
    """

    def hash_range(index: int) -> str:
        start, size_bytes = ranges[index]
        hasher = new_hasher(hash_name)
        position, end = start, start + size_bytes
        while position < end:
            piece = mapped and mapped.piece(position, min(_MAPPED_BYTES, end - position))
            if not piece:
                if not hasattr(_buffers, "piece"):
                    _buffers.piece = memoryview(bytearray(_READ_BYTES))
                piece = _buffers.piece[: end - position]
                file.read_into(piece, position)
            hasher.update(piece)
            if look is not None:
                look(index, piece)
            position += len(piece)
        return hasher.hexdigest()

    hashes = [""] * len(ranges)
    left = iter(range(len(ranges)))  # shared by the threads; `next` of a range is atomic

    def hash_what_is_left() -> None:
        for index in left:
            hashes[index] = hash_range(index)

    workers = min(num_threads(), len(ranges), sum(size_bytes for _, size_bytes in ranges) // _READ_BYTES)
    if workers < 2:
        hash_what_is_left()
        return hashes
    # One task for each thread rather than each range: there may be thousands of small ranges.
    with ThreadPoolExecutor(workers, thread_name_prefix="hash") as pool:
        for task in [pool.submit(hash_what_is_left) for _ in range(workers)]:
            task.result()
    return hashes


_MAX_NAMES = 10
_WEIGHTS = re.compile("(state/)?model/")

# The integer types of each dtype's size, and the smallest bit pattern that is NaN or infinite: all exponent bits set,
# except for float8_e4m3fn, which has no infinity and one NaN. With the sign bit set, the same patterns are the largest
# unsigned integers, so two maxima decide and no value is converted.
FINITE_BITS: dict[str, tuple[type[np.signedinteger[Any]], type[np.unsignedinteger[Any]], int]] = {
    "float64": (np.int64, np.uint64, 0x7FF << 52),
    "float32": (np.int32, np.uint32, 0xFF << 23),
    "bfloat16": (np.int16, np.uint16, 0xFF << 7),
    "float16": (np.int16, np.uint16, 0x1F << 10),
    "float8_e5m2": (np.int8, np.uint8, 0x1F << 2),
    "float8_e4m3fn": (np.int8, np.uint8, 0x7F),
}
_PIECE_ELEMENTS = 1 << 16  # elements; small enough to stay in the core's cache between the two maxima


def weight_names(names: Iterable[str]) -> list[str]:
    """Return the names that are a model's weights, or all names if there are none."""
    names = list(names)
    return [name for name in names if _WEIGHTS.match(name)] or names


def verify_ranges(
    file: FileReader,
    ranges: Mapping[str, tuple[int, int]],
    manifest_hashes: Mapping[str, str],
    hash_name: str,
    weights: Mapping[str, tuple[str, str]],
    mapped: MappedFile | None,
    describe: Callable[[str], str] = str,
) -> set[str]:
    """Compare ranges of a file with their hashes, and search for NaN and infinities while the bytes are at hand.

    `weights` has, for each weight, the name of its range and that of its dtype. Returns the names of the weights in
    which no NaN and no infinity was found.
    """
    indices = {name: index for index, name in enumerate(ranges)}
    # A storage of two weights with different dtypes is checked as one of these only.
    dtypes = {indices[name]: dtype for name, dtype in weights.values() if dtype in FINITE_BITS}
    not_finite: set[int] = set()

    def look(index: int, elements: memoryview) -> None:  # called from several threads
        dtype = dtypes.get(index)
        if dtype is not None and index not in not_finite and not are_finite(elements, dtype):
            not_finite.add(index)

    hashes = hash_ranges(file, [*ranges.values()], hash_name, mapped=mapped, look=look)
    wrong = [name for name, found in zip(ranges, hashes, strict=True) if found != manifest_hashes[name]]
    if wrong:
        raise CorruptCheckpointError(
            f"the bytes of {', '.join(map(describe, wrong[:_MAX_NAMES]))} are not those that were written "
            f"({len(wrong)} of {len(hashes)} hashes differ; the first is at byte {ranges[wrong[0]][0]}). Load another "
            f"checkpoint."
        )
    return {
        name
        for name, (of_range, dtype) in weights.items()
        if indices[of_range] not in not_finite and dtypes.get(indices[of_range]) == dtype
    }


def are_finite(elements: memoryview, dtype: str) -> bool:
    """Return whether no element is NaN or infinite, by the bits of the exponents."""
    signed, unsigned, limit = FINITE_BITS[dtype]
    integers = np.frombuffer(elements, signed)
    sign = 1 << 8 * integers.itemsize - 1
    pieces = (integers[start : start + _PIECE_ELEMENTS] for start in range(0, len(integers), _PIECE_ELEMENTS))
    return all(piece.max() < limit and piece.view(unsigned).max() < sign + limit for piece in pieces)
