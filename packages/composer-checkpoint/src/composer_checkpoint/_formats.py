"""Which format a file has, by its name where the name decides and by its first bytes where they do."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from composer_checkpoint._file_reader import FileReader
from composer_checkpoint._legacy_pt import LEGACY_MAGIC
from composer_checkpoint._zip_layout import LOCAL_MAGIC
from composer_checkpoint.archives import compressor_of, unpacked
from composer_checkpoint.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError
from composer_checkpoint.names import is_tar

__all__ = ["INDEX_SUFFIX", "Format", "final_name", "format_of", "is_packed", "plain_file"]

Format = Literal["safetensors", "pt", "legacy pt", "pickle"]

INDEX_SUFFIX = ".safetensors.index.json"
"""How the name of a list of several safetensors files ends."""

# An unfinished file has its name from the one that it becomes.
_UNFINISHED = re.compile(r"\.tmp-[^/]*$")
_PICKLE_START = b"\x80"


def final_name(path: str) -> str:
    """Return the name that says the format, also of a file that is still being written."""
    return _UNFINISHED.sub("", path)


def is_packed(name: str) -> bool:
    """Return whether the name says that there is another file inside."""
    return is_tar(name) or compressor_of(name) is not None


def format_of(reader: FileReader) -> Format:
    """Return the format of a file that is not packed.

    Raises:
        CorruptCheckpointError: If it is none of them.
    """
    start = reader.read(0, min(reader.size_bytes, len(LEGACY_MAGIC)))
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
    """Yield the file, or what was packed in it; errors inside begin with the file's name."""
    try:
        name = final_name(path)
        if is_packed(name):
            FileReader(path).close()  # says so where it is missing or empty
            with unpacked(path, name, max_expanded_bytes) as plain:
                yield os.fspath(plain)
        else:
            yield path
    except CheckpointError as error:
        if isinstance(error, OSError) or path in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error
    except FileNotFoundError as error:
        if os.path.exists(path):
            raise
        raise NoCheckpointError(f"there is no checkpoint at {path!r}. Check the path.") from error
