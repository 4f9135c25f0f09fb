"""Other commands that installed distributions bring: `composer NAME ...`."""

import os
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

__all__ = ["GROUP", "find_command"]

GROUP = "composer.commands"


def find_command(arguments: Sequence[str]) -> Callable[[Sequence[str]], int] | None:
    """Return the command that a command line begins with, or `None` if it names a script to launch.

    A distribution offers a command by an entry point of the group `composer.commands`: a function from the arguments
    after the name to the exit status. A file of that name comes first, since scripts need no ending.

    Args:
        arguments: The command line after `composer`.
    """
    name = arguments[0] if arguments else ""
    if not name.isidentifier() or os.path.exists(name):  # neither options nor paths are looked for
        return None
    for found in entry_points(group=GROUP, name=name):
        return found.load()
    return None
