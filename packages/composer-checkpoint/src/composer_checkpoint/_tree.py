"""Names for the leaves of nested containers: keys and indices joined by slashes, as in `state/model/fc.weight`.

Trees may come from hostile files, so nothing here recurses, and the total length of names is bounded.
"""

import itertools
import operator
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch

from composer_checkpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, shown
from composer_checkpoint.manifest import Manifest

T = TypeVar("T")


def by_joined_names(
    root: Any, kind: type[T], separator: str, where: str, is_same: Callable[[T, T], bool] = operator.is_
) -> dict[str, T]:
    """Return the objects of a class in nested containers, by the joined keys of their paths.

    The objects of a container that is reached twice have a name for each path. Different objects must not have the same
    name; `where`, for the message, has such names.

    Example:
        >>> by_joined_names({"a": {"c": 1}, "b": 2}, int, ".", "a model")
        {'a.c': 1, 'b': 2}
    """
    found: dict[str, tuple[int, T]] = {}
    numbers = itertools.count()

    def note(name: str, value: Any) -> Any:
        if isinstance(value, kind) and children_of(value) is None:
            number = next(numbers)
            first, known = found.setdefault(name, (number, value))
            if not is_same(known, value):
                # Paths are found by another walk, only for the error: keeping them for all objects would take memory.
                paths: list[str] = []
                map_tree(root, lambda path, one: note_path(paths, path, one), names=Names("", _step))
                raise doubled(paths[first], paths[number], name, where)
        return value

    def note_path(paths: list[str], path: str, value: Any) -> Any:
        if isinstance(value, kind) and children_of(value) is None:
            paths.append(path.removeprefix(_step("")))
        return value

    map_tree(root, note, names=Names(separator))
    return {name: value for name, (_, value) in found.items()}


def refuse_doubled(root: Any, kinds: tuple[type, ...], separator: str, where: str) -> None:
    """Raise if an object of some classes has the name of any other object. `where`, for the message, has such names."""
    # The walk below names every object, so it is left out where it cannot find any.
    if any(True for kind in kinds for _ in named_leaves(root, kind)):

        def may_share(one: object, other: object) -> bool:
            return one is other or not (isinstance(one, kinds) or isinstance(other, kinds))

        by_joined_names(root, object, separator, where, may_share)


def doubled(first: str, second: str, name: str, where: str) -> IncompatibleCheckpointError:
    """Return the error for two objects, given by their paths, that would have the same name in `where`."""
    return IncompatibleCheckpointError(
        f"{first:.200} and {second:.200} would both be called {name!r:.200} in {where}. Give one of them another name: "
        f"in what is saved, or in a file with load_file() and save_file()."
    )


def path_text(keys: Iterable[object]) -> str:
    """Return a path in the form of a Python expression.

    Example:
        >>> path_text(("a", 0, "b.c"))
        "['a'][0]['b.c']"
    """
    return "".join(map(_step, keys))


def _step(key: object) -> str:
    return f"[{key!r}]" if isinstance(key, str | int) else f"[{text_of(key)}]"


def text_of(key: object) -> str:
    """Return the text of a key in a name. A container, which may unfold to any size, is shortened."""
    return key if type(key) is str else shown(key) if isinstance(key, _CONTAINERS) else str(key)


class Names:
    """Maker of the names of one walk, from the texts of keys, with limits on their length and on the walk."""

    __slots__ = ("_entries_left", "_left", "_separator", "_text")

    def __init__(self, separator: str = "/", text: Callable[[object], str] = text_of) -> None:
        self._separator, self._text = separator, text
        self._left = _MAX_NAME_CHARS
        self._entries_left = _MAX_ENTERED_AGAIN

    def join(self, name: str, key: object, depth: int) -> str:
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
        self._entries_left -= 1 + num_items // _ITEMS_PER_ENTRY
        if self._entries_left < 0:
            raise CorruptCheckpointError(
                f"what is in {name[:80]!r} has the same containers in more than {_MAX_ENTERED_AGAIN} places: it was "
                f"made to unfold to endless. Load another checkpoint."
            )


# Writers of pickles, in torch and in Python, recurse for each level, and Python limits that to about a thousand.
_MAX_DEPTH = 10_000
_MAX_NAME_CHARS = 1 << 29
_MAX_ENTERED_AGAIN, _ITEMS_PER_ENTRY = 1 << 16, 64
_MAX_KEY_BITS = 1 << 10  # Python refuses to convert numbers of more than 4300 digits to text

_CONTAINERS = (bytes, tuple, frozenset)


def named_leaves(root: Any, kind: type[Any] = object) -> Iterator[tuple[str, Any]]:
    """Yield each object of a class that is not a dict, list or tuple, with its name.

    A container that is reached twice, or that contains itself, is entered once, which bounds the work for a small file.
    Objects with the same name are distinguished by `#1`, `#2`, and so on. Names of other objects are not even created.
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
                yield unique_name(names.join(parent, key, depth), taken), value
        elif id(value) not in seen and (kind is object or not _has_only_numbers(value)):
            seen.add(id(value))
            name = names.join(parent, key, depth)
            pending.extend((name, key, child, depth + 1) for key, child in reversed(children))


def _has_only_numbers(value: Any) -> bool:
    """Return whether a list or tuple is long and has only plain numbers, such as the state of Python's generator."""
    return isinstance(value, list | tuple) and len(value) > _LONG and {*map(type, value)} <= _NUMBERS


def _is_leaf(value: Any, skip_numbers: bool) -> bool:
    return not isinstance(value, dict | list | tuple) or (skip_numbers and _has_only_numbers(value))


_LONG = 16
_NUMBERS = {int, float, bool, type(None)}


def unique_name(name: str, taken: dict[str, int]) -> str:
    """Return the name, with a number appended if it is taken, and mark the result as taken."""
    own, count = name, taken.get(name, 0)
    while own in taken:
        count += 1
        own = f"{name}#{count}"
    taken[name] = count
    taken.setdefault(own, 0)
    return own


def children_of(value: Any) -> list[tuple[object, Any]] | None:
    """Return a container's items with their keys or indices; `None` for other objects."""
    if isinstance(value, dict):
        return list(dict.items(cast("dict[object, Any]", value)))  # a subclass may override `items`
    if isinstance(value, list | tuple):
        return list(enumerate(cast("list[Any]", value)))
    return None


@dataclass(slots=True)
class _Open:
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
    skip_numbers: bool = False,
    names: Names | None = None,
) -> Any:
    """Return the tree with each object replaced by the result of `change`, containers before their items.

    `change` gets an object's name and the object. Containers without changes are returned as the same objects. If
    `shared`, a container with several names is changed once, under the first of them, and remains one object; otherwise
    it is changed under each name. If `inside_out`, containers are changed after their items. If `skip_numbers`, long
    lists of plain numbers are not entered, for functions that change no numbers.
    """
    # Results of containers by id, together with the container, which keeps the id from being reused during the walk.
    known: dict[int, tuple[Any, Any]] = {}
    entered: dict[int, Any] = {}  # never removed, so that containers which are entered again are counted
    names = names or Names()
    opened = [outside := _Open("", None, None, [("", root)])]
    while not outside.changed:
        top = opened[-1]
        if len(top.changed) == len(top.children):
            opened.pop()
            result = change(top.name, top.result()) if inside_out else top.result()
            known[id(top.original)] = top.original, result
            if not shared:
                del known[id(top.original)]
            opened[-1].changed.append(result)
            continue
        key, child = top.children[len(top.changed)]
        name = names.join(top.name, key, len(opened))
        is_known = id(child) in known  # also while it is open, if it contains itself
        if is_known and (shared or inside_out):
            top.changed.append(known[id(child)][1])
            continue
        value = child if inside_out and not _is_leaf(child, skip_numbers) else change(name, child)
        children = None if is_known or _is_leaf(value, skip_numbers) else children_of(value)
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
    if isinstance(value, dict):
        copied = value.copy()  # keeps the class, such as OrderedDict, and attributes
        copied.update(items)
        return copied
    values = [item for _, item in items]
    if isinstance(value, list):
        return values
    # A named tuple takes its items as arguments.
    return type(value)(*values) if hasattr(value, "_fields") else tuple(values)


_BITS = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128)}
_SHARED_DTYPES = frozenset(["bool", *(f"{kind}{bits}" for kind, sizes in _BITS.items() for bits in sizes)])

_BOUNDED_DEQUE = "deque of at most "
_NOTED = "noted"
_NOTED_BEFORE = "encoded"  # key of an earlier format, whose names are ambiguous
_NUMBER = re.compile(r"-?\d+")

# Factories of a defaultdict, by the kind in the manifest.
_FACTORIES: dict[str, Any] = {
    "defaultdict": None,
    **{f"defaultdict of {factory.__name__}": factory for factory in (int, float, list, dict, set)},
}
_FACTORY_KINDS = {factory: kind for kind, factory in _FACTORIES.items()}


def encode(obj: Any, unknown: list[Any] | None = None) -> tuple[Any, dict[str, str]]:
    """Return the object for saving, and the kinds of values that loading must convert back. `obj` is not changed.

    Leaves that may be more than data, and tensors that may not be in this process's memory, are appended to `unknown`.
    """
    kinds: dict[str, str] = {}

    def change(name: str, value: Any) -> Any:
        if type(value) in _AS_THEY_ARE:
            return value
        kind, plain = _plain_form(value)
        if kind is not None:
            kinds[name] = kind
        elif unknown is not None and not isinstance(plain, dict | list | tuple):
            unknown.extend([] if type(plain) in _TENSORS and not plain.is_meta else [plain])
        return plain

    return map_tree(obj, change, shared=True, skip_numbers=True, names=noted_names()), kinds


_TENSORS = frozenset([torch.Tensor, torch.nn.Parameter])
_AS_THEY_ARE = frozenset([int, float, bool, str, bytes, type(None), dict, list, tuple])


def notes_of(kinds: Mapping[str, str]) -> dict[str, Any]:
    return {_NOTED: dict(kinds)} if kinds else {}


def noted_in(manifest: Manifest | None) -> tuple[Mapping[str, Any], Callable[[], Names]]:
    """Return the kinds in a manifest, and the function that makes the names in it."""
    info = {} if manifest is None else manifest.info
    for key, names in ((_NOTED, noted_names), (_NOTED_BEFORE, Names)):
        if isinstance(kinds := info.get(key), dict):
            return cast("dict[str, Any]", kinds), names
    return {}, noted_names


def noted_names() -> Names:
    """Return the maker of the names of kinds in a manifest, which are unique: keys joined by slashes, with escapes.

    `~` escapes slashes in keys, and distinguishes strings from numbers.
    """
    return Names(text=_noted)


def _noted(key: object) -> str:
    if type(key) is int:
        return text_of(key)
    if not isinstance(key, str):
        return f"~3{text_of(key)}"
    escaped = str(key).replace("~", "~0").replace("/", "~1")
    return f"~2{escaped}" if _NUMBER.fullmatch(escaped) else escaped


def resolve_lazy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose bytes are its elements, unlike those of a lazily conjugated or negated one."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _plain_form(value: Any) -> tuple[str | None, Any]:
    """Return the kind of a value that loading must convert back, or `None`, and the value to save."""
    if isinstance(value, torch.Tensor):
        return None, resolve_lazy(value)
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
        return None, value.item()  # a plain number loads without NumPy's globals
    if isinstance(value, str) and type(value) is not str:
        return None, str.__str__(value)  # a subclass, such as StrEnum, would be pickled with its class
    return None, value


def decode(obj: Any, kinds: Mapping[str, Any], names: Callable[[], Names] = noted_names) -> Any:
    """Return the object that was passed to `encode`, from the one that was read and the kinds by name."""

    def change(name: str, value: Any) -> Any:
        match kinds.get(name), value:
            case "timedelta", float():
                return timedelta(seconds=value)
            case "ndarray", torch.Tensor():
                return value.numpy(force=True)
            case "deque", list():
                return deque(value)
            case str() as kind, list() if kind.startswith(_BOUNDED_DEQUE):
                # The manifest may be hostile, and int() would also accept signs and underscores.
                length = kind.removeprefix(_BOUNDED_DEQUE)
                return deque(value, int(length) if length.isascii() and length.isdigit() else None)
            case "frozenset", set():
                return frozenset(value)
            case str() as kind, dict() if kind in _FACTORIES:
                return defaultdict(_FACTORIES[kind], value)
            case _:
                return value

    return map_tree(obj, change, shared=True, inside_out=True, skip_numbers=True, names=names()) if kinds else obj


def unflatten(leaves: Iterable[tuple[tuple[Any, ...], Any]]) -> Any:
    """Return the nested dicts with leaves at the paths of a validated `.metadata`, whose length is limited.

    Dicts with the keys 0 to n-1 become lists, since DCP stores the items of a list under integer keys.
    """
    root: dict[Any, Any] = {}
    leaves = list(leaves)
    inside = {tuple(path[:depth]) for path, _ in leaves for depth in range(1, len(path))}
    for path, leaf in leaves:
        # A container that is empty on one rank has an entry besides those of its items on other ranks.
        if path in inside and (leaf is None or (isinstance(leaf, dict | list) and not leaf)):
            continue
        inner = root
        for key in path[:-1] if path not in inside else ():
            inner = inner.setdefault(key, {})
        if path in inside or path[-1] in inner:
            raise CorruptCheckpointError(
                f"`.metadata` has an entry at {'/'.join(map(str, path[:10]))!r:.200}, where another one is. Load "
                f"another checkpoint."
            )
        inner[path[-1]] = leaf
    return _with_lists(root)


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict) or not tree:
        return tree
    items = {key: _with_lists(value) for key, value in tree.items()}
    if all(isinstance(key, int) for key in items) and sorted(items) == list(range(len(items))):
        return [items[index] for index in range(len(items))]
    return items
