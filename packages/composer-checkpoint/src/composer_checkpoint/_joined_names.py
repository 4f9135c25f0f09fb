"""Names for nested things where nothing is nested: the keys on the way to them, joined, and never one name for two."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from composer_checkpoint._tree import Names, children_of, map_tree, named_leaves, text_of
from composer_checkpoint.errors import IncompatibleCheckpointError

__all__ = ["by_joined_names", "doubled", "path_text", "refuse_doubled"]

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
    count = 0

    def note(name: str, value: Any) -> Any:
        nonlocal count
        if isinstance(value, kind) and children_of(value) is None:
            count += 1
            if not is_same(found.setdefault(name, value), value):
                paths = [path.removeprefix(_step("")) for path in _told(root, kind, Names("", _step))]
                first = _told(root, kind, Names(separator)).index(name)
                raise doubled(paths[first], paths[count - 1], name, where)
        return value

    map_tree(root, note, names=Names(separator))
    return found


def refuse_doubled(root: Any, kinds: tuple[type, ...], separator: str, where: str) -> None:
    """Refuse things of some classes that have the name of any other thing.

    Args:
        root: The outermost container.
        kinds: Of which classes things need a name of their own.
        separator: What stands between the keys.
        where: What has such names, for the message.

    Raises:
        IncompatibleCheckpointError: If there is one.
    """
    if any(True for kind in kinds for _ in named_leaves(root, kind)):

        def may_share(one: object, other: object) -> bool:
            return one is other or not (isinstance(one, kinds) or isinstance(other, kinds))

        by_joined_names(root, object, separator, where, may_share)


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


def _told(root: Any, kind: type[Any], names: Names) -> Sequence[str]:
    """Return the names of the things, in the order in which they are found."""
    told: list[str] = []

    def note(name: str, value: Any) -> Any:
        if isinstance(value, kind) and children_of(value) is None:
            told.append(name)
        return value

    map_tree(root, note, names=names)
    return told
