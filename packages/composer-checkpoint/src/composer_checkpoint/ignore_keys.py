"""Filters that leave out parts of a checkpoint, by patterns or by a function."""

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Any

from composer_checkpoint._tree import Names, children_of, map_tree

IgnoreKeys = list[str] | Callable[[dict[str, Any]], None]
"""Patterns such as `'state/model/*'`, or a function that deletes entries from a checkpoint's dict."""


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
        found = _prune(content, patterns)
        for pattern in patterns:
            if pattern not in found:
                warnings.warn(
                    f"No parts from loaded checkpoint state_dict were ignored by {argument} {pattern}: nothing in it "
                    f"has such a path. Its top level is {', '.join(map(str, content)) or 'empty now'}.",
                    UserWarning,
                    stacklevel=2,
                )

    return delete


@dataclass(slots=True)
class _Open:
    """A container during the traversal."""

    name: str
    value: Any
    items: list[tuple[Any, Any]]
    is_left_out: bool = False
    kept: list[tuple[Any, Any]] = field(default_factory=list)
    num_seen: int = 0

    def add(self, item: Any, *, is_left_out: bool) -> None:
        """Record the result for the next item."""
        if not is_left_out:
            self.kept.append((self.items[self.num_seen][0], item))
        self.num_seen += 1


def _prune(content: dict[str, Any], patterns: dict[str, re.Pattern[str]]) -> set[str]:
    """Delete matching entries from a dict in place, and return the patterns that matched.

    Deleted entries are searched too, since other patterns may match in them. The content may come from a hostile file,
    so the traversal is iterative, and shared containers are not expanded without limit.
    """
    found: set[str] = set()
    names = Names()
    entered: dict[int, Any] = {}
    open_ids = {id(content)}
    opened = [_Open("", content, children_of(content) or [])]
    while opened:
        top = opened[-1]
        if top.num_seen == len(top.items):
            opened.pop()
            open_ids.discard(id(top.value))
            result = _without_others(top)
            if opened:
                opened[-1].add(result, is_left_out=top.is_left_out)
            continue
        key, child = top.items[top.num_seen]
        path = names.join(top.name, key, len(opened))
        matching = {pattern for pattern, expression in patterns.items() if expression.match(path)}
        found |= matching
        items = children_of(child)
        if items is None or id(child) in open_ids:  # a reference to a container that holds it
            top.add(child, is_left_out=bool(matching))
            continue
        # Counted against a limit: containers that share children could double the work at every level.
        if id(child) in entered:
            names.enter_again(path, len(items))
        # Keeps the container alive, so that its id stays unique.
        entered[id(child)] = child
        open_ids.add(id(child))
        opened.append(_Open(path, child, items, bool(matching)))
    return found


def _without_others(seen: _Open) -> Any:
    """Reduce a container to the kept items, in place; a changed tuple is replaced by a new one."""
    value = seen.value
    if isinstance(value, dict):
        for key in {key for key, _ in seen.items} - {key for key, _ in seen.kept}:
            del value[key]
        value.update(seen.kept)
        return value
    remaining = [child for _, child in seen.kept]
    if isinstance(value, list):
        value[:] = remaining
        return value
    unchanged = len(seen.kept) == len(seen.items) and all(
        new is old for new, (_, old) in zip(remaining, seen.items, strict=True)
    )
    return value if unchanged else tuple(remaining)
