"""A copy of a file for a service that takes it later, when the file itself may be gone."""

import weakref
from pathlib import Path
from shutil import copyfile, rmtree
from tempfile import mkdtemp

__all__ = ["StagedFile"]


class StagedFile:
    """A copy, which is deleted by `remove`, or when nobody has it any more: a call that was to send it may be dropped.

    Args:
        file: What is copied.
        service: For the name of the copy's folder.

    Attributes:
        path: The copy, under the file's own name.

    Example:
        >>> from pathlib import Path
        >>> staged = StagedFile(Path(__file__), "example")
        >>> staged.path.name
        '_staged_file.py'
        >>> staged.remove()
        >>> staged.path.exists()
        False
    """

    def __init__(self, file: Path, service: str) -> None:
        folder = Path(mkdtemp(prefix=f"composer-{service}-"))
        self._remove = weakref.finalize(self, rmtree, folder, ignore_errors=True)
        self._remove.atexit = False  # when Python ends, services still take what is left
        self.path = folder / file.name
        copyfile(file, self.path)

    def remove(self) -> None:
        """Delete the copy."""
        self._remove()
