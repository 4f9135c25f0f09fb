"""Files piped through the command-line compressor that their name asks for."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from composer_checkpoint.archives import KNOWN_COMPRESSORS, CompressorNotFound

__all__ = ["KNOWN_COMPRESSORS", "CliCompressor", "CompressorNotFound", "get_compressor", "is_compressed_pt"]


class CliCompressor:
    """A program that compresses what it reads, and with `-d` does the opposite.

    Args:
        extension: What the names of its files end with, such as `'gz'`.
        cmd: The program; the one that is known for the extension, or else called like it, when `None`.

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
        """Whether the program is installed."""
        return shutil.which(self.cmd) is not None

    def check_exists(self) -> None:
        """Raise unless the program is installed.

        Raises:
            CompressorNotFound: If it is not.
        """
        if not self.exists:
            raise CompressorNotFound(
                f'Could not find command "{self.cmd}" in the PATH. Install it, or choose a file name that ends with '
                f".pt."
            )

    @contextmanager
    def compress(self, out_compressed_filename: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
        """Yield a file; what is written to it is in the other one, compressed, at the end.

        Raises:
            CompressorNotFound: If the program is not installed.
            OSError: If it fails, with what it says.
        """
        self.check_exists()
        with open(out_compressed_filename, "wb") as target, self._run("-c", stdout=target) as process:
            assert process.stdin is not None  # it is a pipe
            with process.stdin:
                yield process.stdin

    @contextmanager
    def decompress(self, in_compressed_filename: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
        """Yield a file from which the other one's content can be read, decompressed, without limit to its size.

        Raises:
            CompressorNotFound: If the program is not installed.
            OSError: If it fails, with what it says.
        """
        self.check_exists()
        with open(in_compressed_filename, "rb") as source, self._run("-dc", stdin=source) as process:
            assert process.stdout is not None  # it is a pipe
            yield process.stdout
            while process.stdout.read(1 << 20):  # a program whose output nobody reads would wait, or fail
                pass

    @contextmanager
    def _run(
        self, flags: str, stdin: IO[bytes] | int = subprocess.PIPE, stdout: IO[bytes] | int = subprocess.PIPE
    ) -> Iterator["subprocess.Popen[bytes]"]:
        with (
            tempfile.TemporaryFile() as messages,
            subprocess.Popen([self.cmd, flags], stdin=stdin, stdout=stdout, stderr=messages) as process,
        ):
            try:
                yield process
            except BaseException:
                process.kill()
                raise
            if process.wait():
                messages.seek(0)
                said = messages.read(400).decode(errors="replace").strip()
                raise OSError(f"{self.cmd} failed: {said}")


def is_compressed_pt(filename: str | os.PathLike[str]) -> bool:
    """Return whether the name has an extension behind `.pt`, which says how the file is compressed.

    Example:
        >>> is_compressed_pt("ep1.pt.gz"), is_compressed_pt("ep1.pt"), is_compressed_pt("ep1.tar.gz")
        (True, False, False)
    """
    return Path(filename).suffixes[-2:-1] == [".pt"]


def get_compressor(filename: str | os.PathLike[str]) -> CliCompressor:
    """Return the compressor for a name.

    Raises:
        CompressorNotFound: If none is known for its extension.

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
