"""Output of the commands: exit codes, results, sizes, escaping and progress bars."""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

DEFAULT_SHARD_BYTES = 5 * 10**9

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str) -> int:
    """Return the number of bytes of a size.

    Example:
        >>> parse_size("1.5GB"), parse_size("2kib"), parse_size("7")
        (1500000000, 2048, 7)
    """
    match = _WRITTEN.fullmatch(text)
    factor = None if match is None else _UNITS.get(match[2].upper())
    size = 0 if match is None or factor is None else int(float(match[1]) * factor)
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: give a number above 0 and a unit, as 5GB or 500MiB")
    return size


def format_size(size_bytes: float) -> str:
    """Return a size in the largest decimal unit that is not larger than it, such as `'1.50 kB'` for 1500."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def counted(count: int, thing: str) -> str:
    """Return a count with its noun, such as `'2 tensors'`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def first_few(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, and how many more there are, such as `'a, b and 1 more'`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class ExitCode(IntEnum):
    """Exit codes of the command."""

    FINE = 0
    FAILURE = 1
    """A failure, a damaged checkpoint, or differences."""
    USAGE = 2
    MISMATCH = 3
    """The written checkpoint differs from the source."""
    UNSAFE = 4
    """The checkpoint contains more than data."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a command."""

    text: str
    data: Mapping[str, Any] = field(default_factory=dict)
    code: int = ExitCode.FINE


class UsageError(ValueError):
    """The arguments contradict each other or the checkpoint."""


class MismatchError(RuntimeError):
    """The written checkpoint differs from the source."""


def printable(text: str) -> str:
    r"""Return a text with escapes for characters that a terminal would interpret; line ends are kept.

    Example:
        >>> printable("\x1b[31mred\nblue")
        '\\x1b[31mred\nblue'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character == "\n" else ascii(character)[1:-1] for character in text
    )


def as_lines(lines: list[str]) -> str:
    r"""Join lines with unprintable characters escaped: a name in a file must not be able to forge a line.

    Example:
        >>> print(as_lines(["ok", "a\nok: forged"]))
        ok
        a\nok: forged
    """
    return "\n".join(printable(line).replace("\n", r"\n") for line in lines)


@contextmanager
def progress_bar(title: str, total_bytes: int, *, quiet: bool = False) -> Iterator[Callable[[int], object]]:
    """Yield a function to call with the number of bytes after each step.

    The bar is written to standard error, and only if that is a terminal.
    """
    from tqdm import tqdm  # imported late to keep `--help` fast

    hidden = quiet or not sys.stderr.isatty()
    with tqdm(total=total_bytes, desc=title, unit="B", unit_scale=True, disable=hidden, leave=False) as bar:
        yield bar.update
