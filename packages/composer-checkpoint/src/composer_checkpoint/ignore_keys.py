"""Filters that leave out parts of a checkpoint, by patterns or by a function."""

import re
import warnings
from collections.abc import Callable, Iterable
from fnmatch import translate
from typing import Any

from composer_checkpoint._tree import map_tree

IgnoreKeys = list[str] | Callable[[dict[str, Any]], None]
"""Patterns such as `'state/model/*'`, or a function that deletes entries from a checkpoint's dict."""

_LEFT_OUT: Any = object()


def check_ignore_keys(argument: str, ignore_keys: Any) -> None:
    """Raise a `TypeError` for a value of `argument` that is neither a list of patterns nor a function."""
    is_list = isinstance(ignore_keys, list | tuple) and all(isinstance(pattern, str) for pattern in ignore_keys)
    if ignore_keys is not None and not is_list and not callable(ignore_keys):
        raise TypeError(
            f"{argument}={ignore_keys!r} must be patterns or a function; give a list of patterns such as "
            f"['state/optimizers/*'], or a function that deletes from the checkpoint's dict."
        )


def without_keys(content: dict[str, Any], ignore_keys: IgnoreKeys | None, argument: str) -> dict[str, Any]:
    """Return a checkpoint's content without some parts. The input is not changed.

    The result always has `state`, which is empty if all of it was left out. `argument` is named in the warning about a
    pattern that matches nothing.
    """
    if ignore_keys is None:
        return content
    # Copied, since a function deletes in place, and containers may belong to an optimizer.
    copied = map_tree(content, lambda _, value: value.copy() if isinstance(value, dict | list) else value)
    (ignore_keys if callable(ignore_keys) else glob_filter(ignore_keys, argument))(copied)
    copied.setdefault("state", {})
    return copied


def glob_filter(exclude_globs: Iterable[str], argument: str = "load_ignore_key") -> Callable[[dict[str, Any]], None]:
    """Return a function that deletes the entries of a dict that match any of several patterns, in place.

    A pattern is compared with the path of each entry, including containers: keys and list positions, joined by slashes.
    A `*` also matches slashes.

    Args:
        exclude_globs: The patterns.
        argument: The name of the argument, for the warning.

    Warns:
        UserWarning: From the returned function, for each pattern that matches nothing.

    Example:
        >>> content = {"state": {"model": {"w": 1, "b": 2}}, "rng": [3]}
        >>> glob_filter(["state/model/w", "rng"])(content)
        >>> content
        {'state': {'model': {'b': 2}}}
    """
    patterns = {pattern: re.compile(translate(pattern)) for pattern in exclude_globs}

    def delete(content: dict[str, Any]) -> None:
        found: set[str] = set()

        def prune(path: str, value: Any) -> Any:
            matching = {pattern for pattern, expression in patterns.items() if path and expression.match(path)}
            found.update(matching)
            return _LEFT_OUT if matching else _pruned(value)

        # After their items, since other patterns may match inside of a container that is left out.
        left = dict(map_tree(content, prune, inside_out=True))
        content.clear()
        content.update(left)
        for pattern in patterns:
            if pattern not in found:
                warnings.warn(
                    f"No parts from loaded checkpoint state_dict were ignored by {argument} {pattern}: nothing in it "
                    f"has such a path. Its top level is {', '.join(map(str, content)) or 'empty now'}.",
                    UserWarning,
                    stacklevel=2,
                )

    return delete


def _pruned(value: Any) -> Any:
    """Return a container, which was copied if an item was replaced, without the items that are left out."""
    if isinstance(value, dict):
        for key in [key for key, item in dict.items(value) if item is _LEFT_OUT]:
            del value[key]
    elif isinstance(value, list | tuple) and any(item is _LEFT_OUT for item in value):
        kept = [item for item in value if item is not _LEFT_OUT]
        return kept if isinstance(value, list) else tuple(kept)
    return value
