"""The streams that loggers for people write to."""

from typing import Any, TextIO

__all__ = ["to_stream"]

_NAMES = ("stdout", "stderr")


def to_stream(stream: Any) -> str | TextIO:
    """Return a stream, or the name of one of Python's, which is looked up when it is written to.

    Raises:
        TypeError: If nothing can be written to it.
        ValueError: If it is another word.
    """
    if isinstance(stream, str) and stream.lower() in _NAMES:
        return stream.lower()
    if isinstance(stream, str) or not callable(getattr(stream, "write", None)):
        kind = ValueError if isinstance(stream, str) else TypeError
        raise kind(f"stream={stream!r} must be 'stderr', 'stdout' or a text stream.")
    return stream
