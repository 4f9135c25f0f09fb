"""A second reader of what a process writes to its console."""

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["StreamCapture"]


class StreamCapture:
    """Hand what is written to `sys.stdout` or `sys.stderr` to a listener as well.

    Args:
        name: `'stdout'` or `'stderr'`; the stream that has this name now.
        listen: Called with each text, after the stream has it.
    """

    def __init__(self, name: str, listen: Callable[[str], None]) -> None:
        self._stream: Any = getattr(sys, name)
        self._listen: Callable[[str], None] | None = listen
        self._write = self._stream.write
        self._was_own = "write" in getattr(self._stream, "__dict__", {})
        self._hook = self._write_and_tell
        self._stream.write = self._hook

    def stop(self) -> None:
        """Put back what was there, and listen no more."""
        self._listen = None
        # Whoever has hooked in after this calls it still, and it only passes on.
        if self._stream.write is not self._hook:
            return
        if self._was_own:
            self._stream.write = self._write
        else:
            del self._stream.write

    def _write_and_tell(self, text: str) -> Any:
        result = self._write(text)
        if self._listen is not None:
            self._listen(text)
        return result
