"""The launcher's own stdout and stderr, whose trouble (closed, full, without the letters) must not become the run's."""

import os
import sys
from contextlib import suppress

__all__ = ["open_console", "release_console", "say"]


_FILE_NUMBERS = {"stdout": 1, "stderr": 2}


def open_console() -> None:
    """Make it possible to write to stdout and stderr, whatever this process was started with.

    What was closed (`>&-`) leads nowhere from now on, for the ranks as well, and letters that the console's encoding
    does not have are written as escapes.
    """
    for name, number in _FILE_NUMBERS.items():
        if getattr(sys, name) is None:
            _lead_nowhere(number)
            setattr(sys, name, os.fdopen(number, "w", closefd=False, errors="backslashreplace"))
        elif hasattr(getattr(sys, name), "reconfigure"):  # not so where a program replaced it
            getattr(sys, name).reconfigure(errors="backslashreplace")


def release_console() -> None:
    """Give up what could not be written: Python would try again at its end, and exit with 120."""
    for name, number in _FILE_NUMBERS.items():
        try:
            getattr(sys, name).flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                if getattr(sys, name).fileno() == number:
                    _lead_nowhere(number)


def say(text: str, stream: str = "stdout") -> None:
    """Write a line for the user to read at once.

    Args:
        text: The line, or several, without the last one's end.
        stream: `'stdout'` or `'stderr'`.
    """
    with suppress(OSError, ValueError):  # the console may be gone, or closed
        getattr(sys, stream).write(f"{text}\n")
        getattr(sys, stream).flush()


def _lead_nowhere(number: int) -> None:
    """Have a descriptor lead to the null device, for this process and those that it starts."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(nowhere, number)
        os.close(nowhere)
