"""Leaving out parts of a checkpoint, by patterns or by a function."""

import re
import warnings
from collections.abc import Callable, Iterable
from fnmatch import translate
from typing import Any

from composer_checkpoint._tree import join, map_tree

__all__ = ["IgnoreKeys", "check_ignore_keys", "glob_filter", "without_keys"]

IgnoreKeys = list[str] | Callable[[dict[str, Any]], None]
"""Patterns such as `'state/model/*'`, or a function that deletes from the dict it is given."""


def check_ignore_keys(argument: str, ignore_keys: Any) -> None:
    """Refuse what is neither patterns nor a function.

    Args:
        argument: What the user calls it.
        ignore_keys: What the user gave.

    Raises:
        TypeError: If it is something else.
    """
    is_list = isinstance(ignore_keys, list | tuple) and all(isinstance(pattern, str) for pattern in ignore_keys)
    if ignore_keys is not None and not is_list and not callable(ignore_keys):
        raise TypeError(
            f"{argument}={ignore_keys!r} says not what to leave out: give a list of patterns such as "
            f"['state/optimizers/*'], or a function that deletes from the checkpoint's dict."
        )


def without_keys(content: dict[str, Any], ignore_keys: IgnoreKeys | None, argument: str) -> dict[str, Any]:
    """Return a checkpoint's content without some parts of it; what was given is not changed.

    `state` is there in any case, empty if all of it was left out.

    Args:
        content: The content.
        ignore_keys: What to leave out.
        argument: What the user calls that, for the warning that a pattern matches nothing.
    """
    if ignore_keys is None:
        return content
    # A function deletes in place, and what is in there may be an optimizer's own.
    copied = map_tree(content, lambda _, value: value.copy() if isinstance(value, dict | list) else value)
    (ignore_keys if callable(ignore_keys) else glob_filter(ignore_keys, argument))(copied)
    copied.setdefault("state", {})
    return copied


def glob_filter(exclude_globs: Iterable[str], argument: str = "load_ignore_key") -> Callable[[dict[str, Any]], None]:
    """Make a function that deletes whatever matches one of several patterns from a dict, in place.

    A pattern is compared with the path of each thing in the dict, containers included: keys, and places in lists,
    joined by slashes. A `*` stands for slashes, too.

    Args:
        exclude_globs: The patterns.
        argument: What the user calls them.

    Warns:
        UserWarning: By the function, of each pattern that matches nothing.

    Example:
        >>> content = {"state": {"model": {"w": 1, "b": 2}}, "rng": [3]}
        >>> glob_filter(["state/model/w", "rng"])(content)
        >>> content
        {'state': {'model': {'b': 2}}}
    """
    patterns = {pattern: re.compile(translate(pattern)) for pattern in exclude_globs}

    def delete(content: dict[str, Any]) -> None:
        found: set[str] = set()
        _prune("", content, patterns, found)
        for pattern in patterns:
            if pattern not in found:
                warnings.warn(
                    f"No parts from loaded checkpoint state_dict were ignored by {argument} {pattern}: nothing in it "
                    f"has such a path. Its top level is {', '.join(map(str, content)) or 'empty now'}.",
                    UserWarning,
                    stacklevel=2,
                )

    return delete


def _prune(name: str, value: Any, patterns: dict[str, re.Pattern[str]], found: set[str]) -> Any:
    """Delete what matches from a container in place, and return it; a tuple is made anew."""
    if not isinstance(value, dict | list | tuple):
        return value
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    kept: list[tuple[Any, Any]] = []
    for key, child in items:
        path = join(name, key)
        matching = {pattern for pattern, expression in patterns.items() if expression.match(path)}
        found |= matching
        pruned = _prune(path, child, patterns, found)  # also of what goes, since other patterns may match in there
        if not matching:
            kept.append((key, pruned))
    if isinstance(value, dict):
        for key in {key for key, _ in items} - {key for key, _ in kept}:
            del value[key]
        value.update(kept)
        return value
    remaining = [child for _, child in kept]
    if isinstance(value, list):
        value[:] = remaining
        return value
    unchanged = len(kept) == len(items) and all(new is old for (_, new), (_, old) in zip(kept, items, strict=True))
    return value if unchanged else tuple(remaining)
