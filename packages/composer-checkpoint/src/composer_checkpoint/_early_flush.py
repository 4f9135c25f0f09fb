"""Getting a file to the disk while it is still being written, so that little is left to wait for at the end."""

import os
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["EarlyFlush"]

_FLUSH_EVERY_BYTES = 32 << 20


class EarlyFlush:
    """Flushes an open file from another thread, each time that enough was written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._flushing: Future[None] | None = None
        self._unflushed_bytes = 0

    def wrote(self, size_bytes: int) -> None:
        """Take note of bytes that were written."""
        self._unflushed_bytes += size_bytes
        if self._unflushed_bytes < _FLUSH_EVERY_BYTES:
            return
        if self._flushing is not None:
            if not self._flushing.done():
                return
            self._flushing.result()  # the system tells of a failed write once, and it may have been told there
        self._flushing = self._pool.submit(_flush, self._descriptor)
        self._unflushed_bytes = 0

    def finish(self) -> None:
        """Wait until all is on the disk."""
        if self._flushing is not None:
            self._flushing.result()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Wait until no thread uses the file."""
        self._pool.shutdown()


# macOS has no fdatasync; there everything waits for the end.
_flush = getattr(os, "fdatasync", lambda descriptor: None)
