"""`.pt` files inside tar archives or compressed by a command-line tool, unpacked within size limits."""

import bz2
import gzip
import io
import lzma
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, NoReturn, cast

from composer_checkpoint._durability import sync_path
from composer_checkpoint._pickle_inspection import LEGACY_MAGIC
from composer_checkpoint.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError, UnsafeCheckpointError
from composer_checkpoint.file_io import FileReader
from composer_checkpoint.formats._zip import LOCAL_MAGIC
from composer_checkpoint.names import is_tar

STATES_NAME = "composer_states.pt"

KNOWN_COMPRESSORS = {
    "bz2": "bzip2",
    "gz": "gzip",
    "lz4": "lz4",
    "lzma": "lzma",
    "lzo": "lzop",
    "xz": "xz",
    "zst": "zstd",
}
"""Command for each extension that may follow `.pt`."""

# Extensions of tar files, and the compression of each.
_TAR_COMPRESSION: dict[str, Literal["", "gz", "bz2", "xz"]] = {
    ".tar": "",
    ".tar.gz": "gz",
    ".tgz": "gz",
    ".tar.bz2": "bz2",
    ".tar.lzma": "xz",  # as Composer writes it: an xz stream
}

# Weights hardly compress, but zeros, such as fresh optimizer state, compress a thousandfold; hence the minimum below.
_LARGEST_RATIO = 100
_ALWAYS_ALLOWED_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20
_MOST_MEMBERS = 1000
# Extended headers, such as one with a long name: tarfile reads them whole into memory.
_MOST_HEADER_BYTES = 1 << 16


class CompressorNotFound(CheckpointError, FileNotFoundError):
    """Raised if the compression that a file name asks for is unknown, or its program is not installed."""


def check_compressor(name: str | os.PathLike[str]) -> None:
    """Raise if this machine cannot write a file of this name, so that a run fails before it trains.

    Raises:
        CompressorNotFound: If the compression is unknown or its program is not installed.
        ValueError: If the name is that of a tar archive with an unsupported compression.
    """
    if is_tar(name):
        _tar_compression(name)
    elif is_compressed_pt(name):
        get_compressor(name).check_exists()


def _tar_compression(name: str | os.PathLike[str]) -> Literal["", "gz", "bz2", "xz"]:
    for extension, compression in _TAR_COMPRESSION.items():
        if os.fspath(name).endswith(extension):
            return compression
    raise ValueError(
        f"{os.fspath(name)!r} does not end with a valid tarfile extension. Valid are {', '.join(_TAR_COMPRESSION)}."
    )


def pack_tar(states: Path, path: str, name: str) -> None:
    """Write a tar archive with one file, compressed as its name says."""
    with tarfile.open(path, cast(Any, f"w:{_tar_compression(name)}")) as archive:
        archive.add(states, STATES_NAME, recursive=False)
    sync_path(Path(path))


def compress(states: Path, path: str, name: str) -> None:
    """Write a file, compressed as its name says."""
    program = get_compressor(name)
    program.check_exists()
    with open(states, "rb") as source, open(path, "wb") as target, program._run("-c", stdin=source, stdout=target):
        pass  # it reads and writes the files itself
    sync_path(Path(path))


def unpack(path: str, name: str, target: Path, max_bytes: int | None = None) -> None:
    """Unpack the `.pt` file of an archive, of which `name` tells the kind, to another file of up to `max_bytes`.

    By default these are a hundred times the size of the archive and at least 16 MiB, but no more than the free space.
    """
    budget = max_bytes
    if budget is None:
        allowed = max(_LARGEST_RATIO * os.path.getsize(path), _ALWAYS_ALLOWED_BYTES)
        budget = min(allowed, shutil.disk_usage(target.parent).free)
    if is_tar(name):
        _extract(path, name, target, budget)
        return
    program = get_compressor(name)
    program.check_exists()  # outside of the `try`, since its error is an OSError
    try:
        with program.decompress(path) as source, open(target, "wb") as out:
            shutil.copyfileobj(cast("IO[bytes]", _Budgeted(source, path, budget)), out, _PIECE_BYTES)
    except OSError as error:
        if error.errno is not None:  # a fault of the disk, not of the program
            raise
        raise CorruptCheckpointError(f"{path!r} cannot be decompressed: {error}. Load another checkpoint.") from error


class _Budgeted(io.RawIOBase):
    """File that raises once more than a given number of bytes is read from it."""

    def __init__(self, source: Any, path: str, budget: int) -> None:
        self._source = source
        self._path = path
        self._budget = self._left = budget

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = self._source.read(min(len(buffer), _PIECE_BYTES))
        self._left -= len(data)
        if self._left < 0:
            raise CorruptCheckpointError(
                f"{self._path!r} of {os.path.getsize(self._path)} bytes unpacks to more than the {self._budget} bytes "
                f"that it may become, as a compression bomb does. If it is meant to be so large, raise "
                f"max_expanded_bytes and see that {tempfile.gettempdir()!r} has room for it, or unpack it yourself."
            )
        buffer[: len(data)] = data
        return len(data)


def _extract(path: str, name: str, target: Path, budget: int) -> None:
    try:
        opener: Any = {"": open, "gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}[_tar_compression(name)]
        with opener(path, "rb") as raw:
            budgeted = cast("IO[bytes]", _Budgeted(raw, path, budget))
            # As a stream, which is read forward and once, so that the budget counts each byte.
            with tarfile.open(fileobj=budgeted, mode="r|", tarinfo=_Header) as archive:
                found = _extract_states(path, archive, target)
            # Read to the end: the checksum of the compressed data follows the end of the archive.
            while budgeted.read(_PIECE_BYTES):
                pass
    # A RecursionError is one of extended headers that precede each other. gzip and bz2 raise an OSError without an
    # errno for damaged data; one with an errno is a fault of the disk.
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError, RecursionError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise CorruptCheckpointError(
            f"{path!r} is not a whole tar archive: {error}. Load another checkpoint."
        ) from error
    if not found:
        raise CorruptCheckpointError(f"{path!r} is a tar archive without {STATES_NAME}. Load another checkpoint.")


class _Header(tarfile.TarInfo):
    """Tar header that refuses those for which tarfile would read unlimited data into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        header = super().frombuf(buf, encoding, errors)
        if header.type == tarfile.XGLTYPE or header.type == tarfile.GNUTYPE_SPARSE:
            raise _bad_header(f"of type {header.type!r}")
        if header.type in _ABOUT_THE_NEXT and header.size > _MOST_HEADER_BYTES:
            raise _bad_header(f"of {header.size} bytes")
        return header

    # tarfile offers no public way to skip the maps of sparse files, which may be as long as a member and take
    # quadratic time to read.
    def _proc_gnusparse_00(self, *_: Any) -> NoReturn:
        raise _bad_header("with a list of holes")

    _proc_gnusparse_01 = _proc_gnusparse_10 = _proc_gnusparse_00


# Types whose content describes the following member, and is read into memory.
_ABOUT_THE_NEXT = frozenset(
    [tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK]
)


def _bad_header(what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"the tar archive has a header {what}, and only headers of up to {_MOST_HEADER_BYTES} bytes that describe a "
        f"single file are read. Load another checkpoint."
    )


def _extract_states(path: str, archive: tarfile.TarFile, target: Path) -> bool:
    """Check each member, and write the first of the right name to a file; return whether there is one."""
    found = False
    for number, member in enumerate(archive):
        if number >= _MOST_MEMBERS:
            raise CorruptCheckpointError(
                f"{path!r} has more than {_MOST_MEMBERS} members, and a checkpoint is one. Load another checkpoint."
            )
        # A backslash separates folders on Windows. Members that are not extracted are compared as well.
        name, fault = PurePosixPath(member.name), ""
        if name.is_absolute() or ".." in name.parts or "\\" in member.name:
            fault = "a name that leads out of the archive"
        elif not (member.isreg() or member.isdir()) or member.issparse():
            kinds = {tarfile.SYMTYPE: "a symbolic link", tarfile.LNKTYPE: "a hard link"}
            fault = kinds.get(member.type, "neither file nor folder")
        if fault:
            link = f" to {member.linkname!r:.200}" if member.linkname else ""
            raise UnsafeCheckpointError(
                f"{path!r} has a member {member.name!r:.200}, {fault}{link}; nothing was extracted. Load a file that "
                f"this package or Composer wrote."
            )
        if name == PurePosixPath(STATES_NAME) and not found:
            found = True
            source = archive.extractfile(member)
            assert source is not None  # other kinds were refused
            with source, open(target, "wb") as out:
                shutil.copyfileobj(source, out, _PIECE_BYTES)
    return found


Format = Literal["safetensors", "pt", "legacy pt", "pickle"]

INDEX_SUFFIX = ".safetensors.index.json"
"""Suffix of the index of several safetensors files."""

# The temporary name of a file is its final name with this suffix.
_UNFINISHED = re.compile(r"\.tmp-[^/]*$")
_PICKLE_START = b"\x80"


def final_name(path: str) -> str:
    """Return the name from which the format follows, also for a file that is still being written."""
    return _UNFINISHED.sub("", path)


def is_packed(name: str) -> bool:
    """Return whether the name is that of an archive with another file inside."""
    return is_tar(name) or (is_compressed_pt(name) and Path(name).suffix[1:] in KNOWN_COMPRESSORS)


def format_of(reader: FileReader) -> Format:
    """Return the format of a file that is not an archive."""
    start = reader.read(0, min(reader.size_bytes, len(LEGACY_MAGIC)))
    # By its name, since a safetensors file starts with the length of its header.
    if final_name(reader.path).endswith(".safetensors"):
        return "safetensors"
    if start.startswith(LOCAL_MAGIC):
        return "pt"
    if start == LEGACY_MAGIC:
        return "legacy pt"
    if start.startswith(_PICKLE_START):
        return "pickle"
    raise CorruptCheckpointError(
        f"the file starts with {start[:8]!r}, so it is neither torch's nor a pickle, and its name does not end with "
        f".safetensors or the extension of an archive. Load another checkpoint."
    )


@contextmanager
def plain_file(path: str, max_expanded_bytes: int | None = None) -> Iterator[str]:
    """Yield the path of a file, or of its content if it is an archive; errors inside are prefixed with the path."""
    try:
        name = final_name(path)
        if is_packed(name):
            FileReader(path).close()  # raises a clear error if the file is missing or empty
            # A file that was mapped into memory stays readable after the folder is deleted.
            with tempfile.TemporaryDirectory(prefix="composer-checkpoint-") as folder:
                plain = Path(folder) / STATES_NAME
                unpack(path, name, plain, max_expanded_bytes)
                yield os.fspath(plain)
        else:
            yield path
    except CheckpointError as error:
        if isinstance(error, OSError) or path in str(error):
            raise  # an OSError that is made from a message would lose its error number
        raise type(error)(f"{path}: {error}") from error
    except FileNotFoundError as error:
        if os.path.exists(path):
            raise  # another file is missing, not the checkpoint
        raise NoCheckpointError(f"there is no checkpoint at {path!r}. Check the path.") from error


class CliCompressor:
    """Program that compresses its standard input, and decompresses it with `-d`.

    Args:
        extension: Extension of its files, such as `'gz'`.
        cmd: Name of the program. When `None`, the known one for the extension, or else the extension itself.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     compressor = CliCompressor("gz")
        ...     with compressor.compress(f"{folder}/notes.gz") as file:
        ...         _ = file.write(b"blue fox")
        ...     with compressor.decompress(f"{folder}/notes.gz") as file:
        ...         file.read()
        b'blue fox'
    """

    def __init__(self, extension: str, cmd: str | None = None) -> None:
        self.extension = extension.removeprefix(".")
        self.cmd = cmd or KNOWN_COMPRESSORS.get(self.extension, self.extension)

    def __repr__(self) -> str:
        return f"CliCompressor(extension={self.extension!r}, cmd={self.cmd!r})"

    @property
    def exists(self) -> bool:
        """Return whether the program is installed."""
        return shutil.which(self.cmd) is not None

    def check_exists(self) -> None:
        """Raise if the program is not installed.

        Raises:
            CompressorNotFound: If the program is not installed.
        """
        if not self.exists:
            raise CompressorNotFound(
                f'Could not find command "{self.cmd}" in the PATH. Install it, or choose a file name that ends with '
                f".pt."
            )

    @contextmanager
    def compress(self, out_compressed_filename: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
        """Yield a file whose content is written to the other one, compressed.

        Raises:
            CompressorNotFound: If the program is not installed.
            OSError: If the program fails, with its message.
        """
        self.check_exists()
        with open(out_compressed_filename, "wb") as target, self._run("-c", stdout=target) as process:
            assert process.stdin is not None  # it is a pipe
            with process.stdin:
                yield process.stdin

    @contextmanager
    def decompress(self, in_compressed_filename: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
        """Yield a file with the decompressed content of the other one, without a size limit.

        Raises:
            CompressorNotFound: If the program is not installed.
            OSError: If the program fails, with its message.
        """
        self.check_exists()
        with open(in_compressed_filename, "rb") as source, self._run("-dc", stdin=source) as process:
            assert process.stdout is not None  # it is a pipe
            yield process.stdout
            while process.stdout.read(1 << 20):  # otherwise the program would block on a full pipe, or fail
                pass

    @contextmanager
    def _run(
        self, flags: str, stdin: IO[bytes] | int = subprocess.PIPE, stdout: IO[bytes] | int = subprocess.PIPE
    ) -> Iterator["subprocess.Popen[bytes]"]:
        with (
            tempfile.TemporaryFile() as messages,  # a pipe that nothing reads would block the program once it is full
            subprocess.Popen([self.cmd, flags], stdin=stdin, stdout=stdout, stderr=messages) as process,
        ):
            try:
                yield process
            except BaseException:
                # Leaving Popen's context waits for the program, which may be waiting for input.
                process.kill()
                raise
            if process.wait():
                messages.seek(0)
                said = messages.read(400).decode(errors="replace").strip()
                raise OSError(f"{self.cmd} failed: {said}")


def is_compressed_pt(filename: str | os.PathLike[str]) -> bool:
    """Return whether the name has an extension after `.pt`, which names the compression.

    Example:
        >>> is_compressed_pt("ep1.pt.gz"), is_compressed_pt("ep1.pt"), is_compressed_pt("ep1.tar.gz")
        (True, False, False)
    """
    return Path(filename).suffixes[-2:-1] == [".pt"]


def get_compressor(filename: str | os.PathLike[str]) -> CliCompressor:
    """Return the compressor for a file name.

    Raises:
        CompressorNotFound: If the extension is unknown.

    Example:
        >>> get_compressor("ep1.pt.zst")
        CliCompressor(extension='zst', cmd='zstd')
    """
    extension = Path(filename).suffix.removeprefix(".")
    if extension not in KNOWN_COMPRESSORS:
        raise CompressorNotFound(
            f'Could not find compressor for "{Path(filename).name}". Known are {", ".join(KNOWN_COMPRESSORS)}.'
        )
    return CliCompressor(extension)
