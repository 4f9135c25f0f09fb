"""Commands that other distributions add to `composer`, and the list of them in its help."""

import ast
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

__all__ = ["GROUP", "describe_commands", "find_command"]

GROUP = "composer.commands"


def find_command(arguments: Sequence[str]) -> Callable[[Sequence[str]], int] | None:
    """Return the command that a command line begins with, or `None` if it names a script.

    A distribution adds a command by an entry point of the group `composer.commands`: a function from the arguments
    after the name to the exit status. A file of the same name takes precedence, since scripts need no extension.
    """
    name = arguments[0] if arguments else ""
    if not name.isidentifier() or os.path.exists(name):  # options and paths are not commands
        return None
    for found in entry_points(group=GROUP, name=name):
        return found.load()
    return None


def describe_commands() -> str:
    """Return the installed commands, one per line, each with the description in its module's docstring."""
    found = dict(_commands())
    width = max(map(len, found), default=0)
    return "".join(f"  {name:{width}}  {_description(entry)}".rstrip() + "\n" for name, entry in found.items())


def _commands() -> Iterator[tuple[str, EntryPoint]]:
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        yield f"composer {entry.name}", entry
    for entry in sorted(entry_points(group="console_scripts"), key=lambda entry: entry.name):
        if entry.name.startswith(("composer-", "composer_")):
            yield entry.name, entry


def _description(entry: EntryPoint) -> str:
    """Return the text after the colon in the first line of a module's docstring, without importing the module."""
    with suppress(Exception):  # the list is complete without it
        spec = find_spec(entry.module)
        docstring = ast.get_docstring(ast.parse(Path(str(spec and spec.origin)).read_text(encoding="utf-8")))
        return (docstring or "").partition("\n")[0].partition(": ")[2].removesuffix(".")
    return ""
