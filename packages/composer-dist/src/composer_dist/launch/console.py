"""The launcher's stdout and stderr, whose failures must not fail the run."""

import os
import sys
from contextlib import suppress

_FILE_NUMBERS = {"stdout": 1, "stderr": 2}


def open_console() -> None:
    """Make stdout and stderr writable, even if they were closed.

    A closed stream (`>&-`) is connected to the null device, for the ranks as well. Characters outside the console's
    encoding are written as escapes.
    """
    for name, number in _FILE_NUMBERS.items():
        if getattr(sys, name) is None:
            _lead_nowhere(number)
            setattr(sys, name, os.fdopen(number, "w", closefd=False, errors="backslashreplace"))
        elif hasattr(getattr(sys, name), "reconfigure"):  # missing if a program replaced the stream
            getattr(sys, name).reconfigure(errors="backslashreplace")


def release_console() -> None:
    """Discard unwritable output, which Python would otherwise write again at exit, with exit code 120."""
    for name, number in _FILE_NUMBERS.items():
        try:
            getattr(sys, name).flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                if getattr(sys, name).fileno() == number:
                    _lead_nowhere(number)


def say(text: str, stream: str = "stdout") -> None:
    """Write a line and flush it."""
    with suppress(OSError, ValueError):  # the console may be closed
        getattr(sys, stream).write(f"{text}\n")
        getattr(sys, stream).flush()


def _lead_nowhere(number: int) -> None:
    """Connect a descriptor to the null device, for this process and its children."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere == number:  # the descriptor was closed, and open() reused its number
        os.set_inheritable(number, True)
    else:
        os.dup2(nowhere, number)
        os.close(nowhere)
