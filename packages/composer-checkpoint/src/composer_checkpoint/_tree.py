"""Names for what lies inside nested containers: keys and indices joined by slashes, as in `state/model/fc.weight`.

Trees may come from files that were made to be a burden, so nothing here recurses, and what names take is bounded.
"""

import operator
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast, overload

import numpy as np
import torch

from composer_checkpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, shown
from composer_checkpoint.manifest import Manifest

__all__ = [
    "decode",
    "encode",
    "notes_of",
    "noted_in",
    "noted_names",
    "by_joined_names",
    "doubled",
    "path_text",
    "refuse_doubled",
    "Names",
    "children_of",
    "map_tree",
    "named_leaves",
    "text_of",
    "untaken",
    "with_items",
]

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


def _told(root: Any, kind: type[Any], names: Names) -> Sequence[str]:
    """Return the names of the things, in the order in which they are found."""
    told: list[str] = []

    def note(name: str, value: Any) -> Any:
        if isinstance(value, kind) and children_of(value) is None:
            told.append(name)
        return value

    map_tree(root, note, names=names)
    return told


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


_BITS = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128)}
_SHARED_DTYPES = frozenset(["bool", *(f"{kind}{bits}" for kind, sizes in _BITS.items() for bits in sizes)])

_BOUNDED_DEQUE = "deque of at most "
_NOTED = "noted"
_NOTED_BEFORE = "encoded"  # under names that did not tell every key from every other
_NUMBER = re.compile(r"-?\d+")

# What a defaultdict may start from, by the kind that the manifest notes.
_FACTORIES: dict[str, Any] = {
    "defaultdict": None,
    **{f"defaultdict of {factory.__name__}": factory for factory in (int, float, list, dict, set)},
}
_FACTORY_KINDS = {factory: kind for kind, factory in _FACTORIES.items()}


def encode(obj: Any) -> tuple[Any, dict[str, str]]:
    """Return the object for saving, and the kind of each value that must be turned back. `obj` is not changed."""
    kinds: dict[str, str] = {}

    def change(name: str, value: Any) -> Any:
        kind, plain = _plain_form(value)
        if kind is not None:
            kinds[name] = kind
        return plain

    return map_tree(obj, change, shared=True, names=noted_names()), kinds


def notes_of(kinds: Mapping[str, str]) -> dict[str, Any]:
    """Return how a manifest notes kinds."""
    return {_NOTED: dict(kinds)} if kinds else {}


def noted_in(manifest: Manifest | None) -> tuple[Mapping[str, Any], Callable[[], Names]]:
    """Return the kinds that a manifest notes, and what makes the names under which it does."""
    info = {} if manifest is None else manifest.info
    for key, names in ((_NOTED, noted_names), (_NOTED_BEFORE, Names)):
        if isinstance(kinds := info.get(key), dict):
            return cast("dict[str, Any]", kinds), names
    return {}, noted_names


def noted_names() -> Names:
    """Return what makes the names under which the manifest notes kinds: keys joined by slashes, no two places alike.

    Keys with a slash are told from the keys on a way, and texts from numbers, by what `~` stands before.
    """
    return Names(text=_noted)


def _noted(key: object) -> str:
    if type(key) is int:
        return text_of(key)
    if not isinstance(key, str):
        return f"~3{text_of(key)}"
    escaped = str(key).replace("~", "~0").replace("/", "~1")
    return f"~2{escaped}" if _NUMBER.fullmatch(escaped) else escaped


def _plain_form(value: Any) -> tuple[str | None, Any]:
    """Return what to save for one value, and how to call it if it must be turned back."""
    if isinstance(value, torch.Tensor):  # whose bytes are not its elements where torch conjugates or negates lazily
        return None, value.resolve_conj().resolve_neg() if value.is_conj() or value.is_neg() else value
    if isinstance(value, timedelta):
        return "timedelta", value.total_seconds()  # exact to the microsecond for 285 years
    if type(value) is np.ndarray and value.dtype.name in _SHARED_DTYPES and value.dtype.isnative:
        return "ndarray", torch.from_numpy(value.copy())
    if type(value) is deque:
        return "deque" if value.maxlen is None else f"{_BOUNDED_DEQUE}{value.maxlen}", list(value)
    if type(value) is frozenset:
        return "frozenset", set(value)
    if type(value) is defaultdict and value.default_factory in _FACTORY_KINDS:
        return _FACTORY_KINDS[value.default_factory], dict(value)
    if isinstance(value, np.generic):
        return None, value.item()
    if isinstance(value, str) and type(value) is not str:
        return None, str.__str__(value)
    return None, value


def decode(obj: Any, kinds: Mapping[str, Any], names: Callable[[], Names] = noted_names) -> Any:
    """Return what was given to `encode`.

    Args:
        obj: What was read.
        kinds: By name, those of `encode`.
        names: Makes these names.
    """

    def change(name: str, value: Any) -> Any:
        match kinds.get(name), value:
            case "timedelta", float():
                return timedelta(seconds=value)
            case "ndarray", torch.Tensor():
                return value.numpy(force=True)
            case "deque", list():
                return deque(value)
            case str() as kind, list() if kind.startswith(_BOUNDED_DEQUE):
                length = kind.removeprefix(_BOUNDED_DEQUE)
                return deque(value, int(length) if length.isascii() and length.isdigit() else None)
            case "frozenset", set():
                return frozenset(value)
            case str() as kind, dict() if kind in _FACTORIES:
                return defaultdict(_FACTORIES[kind], value)
            case _:
                return value

    return map_tree(obj, change, shared=True, inside_out=True, names=names()) if kinds else obj
