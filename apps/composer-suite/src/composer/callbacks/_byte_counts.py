"""Numbers of bytes for people."""

from __future__ import annotations

__all__ = ["readable"]


def readable(size_bytes: int) -> str:
    """Return a number of bytes in the largest unit of which there is one.

    >>> readable(1536), readable(17)
    ('1.5 KiB', '17 B')
    """
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if unit != "B" else f"{size_bytes} B"
