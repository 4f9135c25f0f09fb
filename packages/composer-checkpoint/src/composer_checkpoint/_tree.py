"""Names for what lies inside nested containers: keys and indices joined by slashes, as in `state/model/fc.weight`.

Trees may come from files that were made to be a burden, so nothing here recurses, and what names take is bounded.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast, overload

from composer_checkpoint.errors import CorruptCheckpointError, shown

__all__ = ["Names", "children_of", "map_tree", "named_leaves", "text_of", "untaken", "with_items"]

T = TypeVar("T")

# A pickle of torch's or Python's is written by a function that calls itself for each level, about a thousand times.
_MAX_DEPTH = 10_000
_MAX_NAME_CHARS = 1 << 29
_MAX_ENTERED_AGAIN, _ITEMS_PER_ENTRY = 1 << 16, 64
_MAX_KEY_BITS = 1 << 10  # Python refuses to write out numbers of more than 4300 digits

_CONTAINERS = (bytes, tuple, frozenset)


@overload
def named_leaves(root: Any) -> Iterator[tuple[str, Any]]: ...
@overload
def named_leaves(root: Any, kind: type[T]) -> Iterator[tuple[str, T]]: ...
def named_leaves(root: Any, kind: type[Any] = object) -> Iterator[tuple[str, Any]]:
    """Yield each thing that is not a dict, list or tuple, with its name.

    A container that is reached twice, or that holds itself, is entered once, so that a small file cannot ask for
    endless work. Two things of one name are told apart by `#1`, `#2`, and so on.

    Args:
        root: The outermost container, or a thing alone.
        kind: Of which class the things must be. Names of others are not even made.

    Raises:
        CorruptCheckpointError: If it is nested deeper, or names are longer, than in any checkpoint.
    """
    seen: set[int] = set()
    taken: dict[str, int] = {}
    names = Names()
    pending: list[tuple[str, object, Any, int]] = [("", "", root, 0)]
    while pending:
        parent, key, value, depth = pending.pop()
        children = children_of(value)
        if children is None:
            if isinstance(value, kind):
                yield untaken(names.join(parent, key, depth), taken), value
        elif id(value) not in seen:
            seen.add(id(value))
            name = names.join(parent, key, depth)
            pending.extend((name, key, child, depth + 1) for key, child in reversed(children))


def untaken(name: str, taken: dict[str, int]) -> str:
    """Return the name, with a number if another thing has it, and note that it is taken."""
    own, count = name, taken.get(name, 0)
    while own in taken:
        count += 1
        own = f"{name}#{count}"
    taken[name] = count
    taken.setdefault(own, 0)
    return own


def text_of(key: object) -> str:
    """Return how a key is told in a name; of what may unfold to endless, only what it begins with."""
    return key if type(key) is str else shown(key) if isinstance(key, _CONTAINERS) else str(key)


class Names:
    """Makes the names of one walk, as long as neither they nor the walk take too much.

    Args:
        separator: What stands between the keys.
        text: Returns how a key is told.
    """

    __slots__ = ("_entries_left", "_left", "_separator", "_text")

    def __init__(self, separator: str = "/", text: Callable[[object], str] = text_of) -> None:
        self._separator, self._text = separator, text
        self._left = _MAX_NAME_CHARS
        self._entries_left = _MAX_ENTERED_AGAIN

    def join(self, name: str, key: object, depth: int) -> str:
        """Return the name of a container's item.

        Raises:
            CorruptCheckpointError: If it lies deeper, or names are longer, than in any checkpoint.
        """
        is_huge = isinstance(key, int) and key.bit_length() > _MAX_KEY_BITS
        text = "" if is_huge else self._text(key)
        self._left -= len(name) + 1 + len(text)
        if depth > _MAX_DEPTH or self._left < 0 or is_huge:
            raise CorruptCheckpointError(
                f"what is in {name[:80]!r}, {depth} levels deep, has names of no checkpoint: no more than {_MAX_DEPTH} "
                f"levels, keys of {_MAX_KEY_BITS} bits and {_MAX_NAME_CHARS} characters in all are read. Load another "
                f"checkpoint."
            )
        return f"{name}{self._separator}{text}" if name else text

    def enter_again(self, name: str, num_items: int) -> None:
        """Count a container that was entered before, under another name.

        Raises:
            CorruptCheckpointError: If there were too many.
        """
        self._entries_left -= 1 + num_items // _ITEMS_PER_ENTRY
        if self._entries_left < 0:
            raise CorruptCheckpointError(
                f"what is in {name[:80]!r} has the same containers in more than {_MAX_ENTERED_AGAIN} places: it was "
                f"made to unfold to endless. Load another checkpoint."
            )


def children_of(value: Any) -> list[tuple[object, Any]] | None:
    """Return a container's items with their keys or places, or `None` for what is none."""
    if isinstance(value, dict):
        return list(dict.items(cast("dict[object, Any]", value)))  # an instance's own `items` may be anything
    if isinstance(value, list | tuple):
        return list(enumerate(cast("list[Any]", value)))
    return None


@dataclass(slots=True)
class _Open:
    """A container whose items are being changed."""

    name: str
    original: Any
    value: Any
    children: list[tuple[Any, Any]]
    changed: list[Any] = field(default_factory=list)

    def result(self) -> Any:
        if all(new is old for new, (_, old) in zip(self.changed, self.children, strict=True)):
            return self.value
        return with_items(self.value, [(key, new) for (key, _), new in zip(self.children, self.changed, strict=True)])


def map_tree(
    root: Any,
    change: Callable[[str, Any], Any],
    *,
    shared: bool = False,
    inside_out: bool = False,
    names: Names | None = None,
) -> Any:
    """Return the tree with each thing, containers before what is in them, replaced by what `change` makes of it.

    Containers in which nothing changed are the same objects.

    Args:
        root: The outermost container, or a thing alone.
        change: Gets a thing's name and the thing.
        shared: Whether a container that is reached by several names is changed once, under the first of them, and is
            one object afterwards, too. Otherwise it is changed anew under each.
        inside_out: Whether containers are changed after what is in them.
        names: How things are called, in place of keys and indices joined by slashes.

    Raises:
        CorruptCheckpointError: If it is nested deeper, or names are longer, than in any checkpoint.
    """
    # What a container becomes, by its identity; with the container, so that nothing else gets its identity meanwhile.
    known: dict[int, tuple[Any, Any]] = {}
    entered: dict[int, Any] = {}
    outside = _Open("", None, None, [("", root)])
    opened, names = [outside], names or Names()
    while not outside.changed:
        top = opened[-1]
        if len(top.changed) == len(top.children):
            opened.pop()
            result = change(top.name, top.result()) if inside_out else top.result()
            if shared:
                known[id(top.original)] = top.original, result
            else:
                del known[id(top.original)]
            opened[-1].changed.append(result)
            continue
        key, child = top.children[len(top.changed)]
        name = names.join(top.name, key, len(opened))
        if id(child) in known and (shared or inside_out):
            top.changed.append(known[id(child)][1])
            continue
        is_deferred = inside_out and children_of(child) is not None
        value = child if is_deferred else change(name, child)
        children = None if id(child) in known else children_of(value)  # known while it is open, too: it holds itself
        if children is None:
            top.changed.append(value)
        else:
            if id(child) in entered:
                names.enter_again(name, len(children))
            entered[id(child)] = child
            known[id(child)] = child, value
            opened.append(_Open(name, child, value, children))
    return outside.changed[0]


def with_items(value: Any, items: list[tuple[Any, Any]]) -> Any:
    """Return a container like another one, with other items in the places of its own."""
    if isinstance(value, dict):
        copied = value.copy()  # keeps the kind, such as OrderedDict, and its attributes
        copied.update(items)
        return copied
    values = [item for _, item in items]
    if isinstance(value, list):
        return values
    return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
