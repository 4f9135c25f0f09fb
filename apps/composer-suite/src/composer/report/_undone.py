"""The end of a file that a resumed run writes again."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

__all__ = ["keep_lines"]


def keep_lines(path: Path, num_lines: int) -> int:
    """Keep the first lines of a file, without one in which a killed run broke off, and return how many there are.

    The file is replaced when the new one is complete.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    num_kept = 0
    with path.open("rb") as lines, unfinished.open("wb") as kept:
        for line in islice(lines, num_lines):
            if line.endswith(b"\n"):
                kept.write(line)
                num_kept += 1
    unfinished.replace(path)
    return num_kept
