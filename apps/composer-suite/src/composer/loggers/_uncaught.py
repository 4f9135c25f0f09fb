"""Whether a run ends well, for services that show it."""

import sys
from types import TracebackType
from typing import Any

__all__ = ["UncaughtErrors"]


class UncaughtErrors:
    """Notice the exception that ends the process, between `watch` and `stop`.

    `sys.excepthook` is called as before, and put back afterwards unless somebody else has hooked in meanwhile.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._hook: Any = None
        self._has_seen = False

    def watch(self) -> None:
        """Begin."""
        self._before, self._hook, self._has_seen = sys.excepthook, self._notice, False
        sys.excepthook = self._hook

    def has_failed(self) -> bool:
        """Answer whether an exception is on its way, or has ended the process."""
        return self._has_seen or sys.exc_info()[1] is not None

    def stop(self) -> None:
        """End."""
        if self._hook is not None and sys.excepthook is self._hook:
            sys.excepthook = self._before
        self._hook = None

    def _notice(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._has_seen = True
        self._before(kind, error, trace)
