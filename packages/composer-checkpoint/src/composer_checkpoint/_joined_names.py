"""Names for nested things where nothing is nested: the keys on the way to them, joined, and never one name for two."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from composer_checkpoint._tree import Names, children_of, map_tree, text_of
from composer_checkpoint.errors import IncompatibleCheckpointError

__all__ = ["by_joined_names", "doubled", "path_text"]

T = TypeVar("T")


def by_joined_names(
    root: Any,
    kind: type[T],
    separator: str,
    where: str,
    is_same: Callable[[T, T], bool] = operator.is_,
) -> dict[str, T]:
    """Return the things of a class that lie in nested containers, by the keys on the way to each.

    A container that is reached twice has its things under both names.

    Args:
        root: The outermost container.
        kind: Of which class the things must be.
        separator: What stands between the keys.
        where: What has such names, for the message.
        is_same: Whether two things are one, which may have a name twice.

    Raises:
        IncompatibleCheckpointError: If two things would have one name, or names are longer than in any checkpoint.

    Example:
        >>> by_joined_names({"a": {"c": 1}, "b": 2}, int, ".", "a model")
        {'a.c': 1, 'b': 2}
    """
    found: dict[str, T] = {}
    order: list[str] = []

    def note(name: str, value: Any) -> Any:
        if isinstance(value, kind) and children_of(value) is None:
            order.append(name)
            if not is_same(found.setdefault(name, value), value):
                first = order.index(name)
                paths = _paths(root, kind)
                raise doubled(paths[first], paths[len(order) - 1], name, where)
        return value

    map_tree(root, note, names=Names(separator))
    return found


def doubled(first: str, second: str, name: str, where: str) -> IncompatibleCheckpointError:
    """Return the error that says which two things would have one name.

    Args:
        first: Where one of them is, as it can be told apart from the other.
        second: Where the other is.
        name: The one name.
        where: What has such names.
    """
    return IncompatibleCheckpointError(
        f"{first:.200} and {second:.200} would both be called {name!r:.200} in {where}. Give one of them another name: "
        f"in what is saved, or in a file with load_file() and save_file()."
    )


def path_text(keys: Iterable[object]) -> str:
    """Return the way to a thing as Python has it.

    Example:
        >>> path_text(("a", 0, "b.c"))
        "['a'][0]['b.c']"
    """
    return "".join(map(_step, keys))


def _step(key: object) -> str:
    return f"[{key!r}]" if isinstance(key, str | int) else f"[{text_of(key)}]"


def _paths(root: Any, kind: type[Any]) -> Sequence[str]:
    """Return the ways to the things, in the order in which they are found."""
    paths: list[str] = []

    def note(path: str, value: Any) -> Any:
        if isinstance(value, kind) and children_of(value) is None:
            paths.append(path.removeprefix(_step("")))  # of the outermost container itself
        return value

    map_tree(root, note, names=Names("", _step))
    return paths
