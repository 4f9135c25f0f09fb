"""Names for what lies inside nested containers: keys and indices joined by slashes, as in `state/model/fc.weight`."""

from collections.abc import Callable, Iterator
from typing import Any, cast

__all__ = ["map_tree", "named_leaves"]


def named_leaves(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield each thing that is not a dict, list or tuple, with its name.

    A container that is reached twice, or that holds itself, is entered once, so that a small file cannot ask for
    endless work. Two things of one name are told apart by `#1`, `#2`, and so on.
    """
    seen: set[int] = set()
    taken: dict[str, int] = {}
    pending: list[tuple[str, Any]] = [("", root)]
    while pending:
        name, value = pending.pop()
        children = _children(value)
        if children is None:
            count = taken[name] = taken.get(name, -1) + 1
            yield (f"{name}#{count}" if count else name), value
        elif id(value) not in seen:
            seen.add(id(value))
            pending.extend((join(name, key), child) for key, child in reversed(children))


def join(name: str, key: object) -> str:
    """Return the name of a container's item."""
    return f"{name}/{key}" if name else str(key)


def _children(value: Any) -> list[tuple[object, Any]] | None:
    if isinstance(value, dict):
        return list(dict.items(cast("dict[object, Any]", value)))  # an instance's own `items` may be anything
    if isinstance(value, list | tuple):
        return list(enumerate(cast("list[Any]", value)))
    return None


def map_tree(root: Any, change: Callable[[str, Any], Any]) -> Any:
    """Return the tree with each thing, containers before what is in them, replaced by what `change` makes of it.

    Containers in which nothing changed are the same objects.
    """
    return _mapped("", root, change, set())


def _mapped(name: str, original: Any, change: Callable[[str, Any], Any], entered: set[int]) -> Any:
    value = change(name, original)
    children = _children(value)
    if children is None or id(original) in entered:  # in the latter case it holds itself
        return value
    entered.add(id(original))
    changed = [(key, _mapped(join(name, key), child, change, entered)) for key, child in children]
    entered.discard(id(original))
    if all(new is old for (_, new), (_, old) in zip(changed, children, strict=True)):
        return value
    return _rebuilt(value, changed)


def _rebuilt(value: Any, items: list[tuple[Any, Any]]) -> Any:
    if isinstance(value, dict):
        copied = value.copy()  # keeps the kind, such as OrderedDict, and its attributes
        copied.update(items)
        return copied
    values = [item for _, item in items]
    if isinstance(value, list):
        return values
    return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
