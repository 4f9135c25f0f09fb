"""What the parts of a dataloader hold that changes from epoch to epoch, or while they are read.

Parts are all objects that a dataloader leads to by attributes, items, arguments, closures and the globals that its
functions name. Of these, a checkpoint keeps what is small: generators of random numbers, what `state_dict` gives, and
numbers, flags and texts that are no longer as they were when the run began. Settings are not kept.
"""

import copy
import functools
import inspect
import logging
import random
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from composer_checkpoint._encoding import encode
from composer_checkpoint._more_than_data import refuse_more_than_data

__all__ = ["HeldState", "changing_state", "holds_generators", "set_epoch_everywhere"]

_KINDS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
_LEAVES = (str, bytes, int, float, bool, type(None), type, ModuleType, BuiltinFunctionType, np.ndarray, torch.Tensor)
_NOT_DATA = (logging.Logger, torch.optim.Optimizer, random.SystemRandom)
_PLAIN = (int, float, bool, str, type(None))
_FOREIGN = frozenset({"torch", "numpy", *sys.stdlib_module_names} - {"__main__"})  # whose classes hold no generators
_MAX_OBJECTS = 5_000
_MAX_ITEMS = 64  # a dataset may list millions of samples, which are all alike, and has few transforms
_MAX_CHARACTERS = 1_000
_MISSING = object()


@dataclass(frozen=True, slots=True)
class _Part:
    """An object of a dataloader.

    Attributes:
        name: How it is reached.
        value: The object.
        loads: Whether it serves to load samples, not to choose them.
    """

    name: str
    value: Any
    loads: bool


class HeldState:
    """Keeps and puts back what the parts of one dataloader hold.

    Args:
        loader: As the run begins with it, before any listener acts on it.
        only_generators: Whether the dataloader takes care of all else, since it knows its place.
    """

    def __init__(self, loader: Any, only_generators: bool = False) -> None:
        self.loader = loader
        self._only_generators = only_generators
        self._first = {part.name: _plain_values(part.value) for part in _parts(loader)}
        self._warned = set[str]()

    def capture(self, *, whole: bool = False) -> dict[str, Any]:
        """Return what changes, by the name of the part; nothing where there is nothing.

        Args:
            whole: Whether to return numbers, flags and texts that are as they were when the run began, too.
        """
        found: dict[str, dict[str, Any]] = {"generators": {}, "values": {}, "objects": {}}
        for part in _parts(self.loader):
            if isinstance(part.value, _KINDS):
                found["generators"][part.name] = _generator_state(part.value)
            if isinstance(part.value, _KINDS) or self._only_generators:
                continue
            values = _plain_values(part.value)
            first = {} if whole else self._first.get(part.name, {})
            # With its type, since True equals 1.
            changed = {
                key: value
                for key, value in values.items()
                if (type(value), value) != (type(first.get(key)), first.get(key, _MISSING))
            }
            if changed:
                found["values"][part.name] = changed
            if part.value is not self.loader and _has_own_state(part.value):
                state = self._ask(part)
                if state is not _MISSING:
                    found["objects"][part.name] = {"state": state, "values": values}
        return {kind: entries for kind, entries in found.items() if entries}

    def restore(self, saved: Mapping[str, Any], *, loads: bool | None = None) -> None:
        """Put back what `capture` returned.

        Args:
            saved: What to put back, as far as the dataloader has these parts.
            loads: Whether to do so for what loads samples, or for the others, alone.
        """
        parts = [part for part in _parts(self.loader) if loads is None or part.loads == loads]
        for part in parts if not self._only_generators else ():
            if part.name in saved.get("objects", {}):
                _load(part.value, **saved["objects"][part.name])
            _set_values(part.value, saved.get("values", {}).get(part.name, {}))
        for part in parts:
            if isinstance(part.value, _KINDS) and part.name in saved.get("generators", {}):
                _set_generator_state(part.value, saved["generators"][part.name])

    def missing(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the names of generators and of objects with a state that the dataloader does not have, or not yet."""
        kinds = {part.name: type(part.value) for part in _parts(self.loader)}
        return [name for kind in ("generators", "objects") for name in saved.get(kind, ()) if name not in kinds]

    def shares_generators(self) -> bool:
        """Return whether what chooses samples draws from a generator that what loads them draws from, too."""
        return any(True for _ in _shared_generators(self.loader))

    def _ask(self, part: _Part) -> Any:
        try:
            state = copy.deepcopy(part.value.state_dict())
            refuse_more_than_data(encode(state)[0], part.name)
        except Exception as error:
            if part.name not in self._warned:
                self._warned.add(part.name)
                warnings.warn(
                    f"The state of train_dataloader.{part.name}, a {type(part.value).__name__}, is not in the "
                    f"checkpoints, so a resumed run may read other samples: {type(error).__name__}: {error} Let its "
                    "state_dict() return numbers, texts, tensors, and lists and dicts of these, at any time.",
                    stacklevel=2,
                )
            return _MISSING
        return state


def set_epoch_everywhere(holder: Any, epoch: int, done: Iterable[object] = ()) -> list[object]:
    """Call `set_epoch` of every part of a dataloader that has it, the innermost first.

    Args:
        holder: The dataloader, or what holds parts of it.
        epoch: The number of the epoch.
        done: Those of the parts that have the number already.

    Returns:
        The parts that have it now.
    """
    has_it = {id(part) for part in done}
    found = [part.value for part in reversed(_parts(holder)) if callable(getattr(type(part.value), "set_epoch", None))]
    for part in found:
        if id(part) not in has_it:
            part.set_epoch(epoch)
    return found


def holds_generators(*holders: object) -> bool:
    """Return whether objects hold random number generators, in attributes, arguments, closures, or what those hold.

    The generators of the process do not count. The search is cut short where there is very much to look at.

    Example:
        >>> holds_generators({"transforms": [random.Random(3)]}), holds_generators([torch.rand(2), random.uniform])
        (True, False)
    """
    return any(isinstance(part.value, _KINDS) for part in _parts(holders))


def changing_state(*holders: object) -> dict[str, Any]:
    """Return the numbers, flags, texts and states that objects hold, to compare them with those of later."""
    parts = _parts(holders)
    states = {part.name: repr(part.value.state_dict()) for part in parts if _has_own_state(part.value)}
    return {"states": states, **{part.name: _plain_values(part.value) for part in parts}}


def _parts(loader: Any) -> list[_Part]:
    """Return the parts of a dataloader, what loads samples first, and each of them before what it holds."""
    found: list[_Part] = []
    seen = {id(_owner(random.random)), id(_owner(np.random.rand)), id(torch.default_generator)}
    loading = [(name, getattr(loader, name)) for name in ("dataset", "collate_fn")] if _is_torchs(loader) else []
    for loads, waiting in ((True, deque(loading)), (False, deque([("", loader)]))):
        limit = len(found) + _MAX_OBJECTS
        while waiting and len(found) < limit:
            name, value = waiting.popleft()
            if isinstance(value, _LEAVES) or id(value) in seen or not _is_data(value):
                continue
            seen.add(id(value))
            found.append(_Part(name, value, loads))
            if not isinstance(value, _KINDS):
                waiting.extend((f"{name}.{key}" if name else str(key), inner) for key, inner in _inside(value))
    return found


def _shared_generators(loader: Any) -> Iterator[object]:
    choosing = [part.value for part in _parts(loader) if not part.loads]
    loading = {id(part.value) for part in _parts(loader) if part.loads and isinstance(part.value, _KINDS)}
    for value in choosing:
        yield from (inner for _, inner in _inside(value) if id(inner) in loading)


def _is_torchs(loader: Any) -> bool:
    return isinstance(loader, DataLoader)


def _is_data(value: Any) -> bool:
    if isinstance(value, _NOT_DATA) or type(value).__module__.startswith(("composer_events.", "composer.trainer.")):
        return False
    return not isinstance(value, torch.nn.Module) or next(value.parameters(), None) is None


def _inside(value: Any) -> Iterable[tuple[object, Any]]:
    match value:
        case dict():
            return list(islice(value.items(), _MAX_ITEMS))
        case list() | tuple() | set() | deque():
            return list(enumerate(islice(value, _MAX_ITEMS)))
        case functools.partial():
            return [("func", value.func), *enumerate(value.args), *value.keywords.items()]
        case FunctionType():
            return [*_attributes(value).items(), *_outside(value)]
        case MethodType():
            return [("__self__", value.__self__), ("__func__", value.__func__)]
        case DataLoader():  # `_iterator` are its workers
            return [(key, inner) for key, inner in _attributes(value).items() if key != "_iterator"]
        case _:
            return [*_attributes(value).items(), *_of_class(type(value))]


def _attributes(value: Any) -> dict[str, Any]:
    """Return what an object has in its dict, its slots or, as the cell of a closure, in it."""
    if isinstance(value, CellType):
        return {"cell_contents": content} if (content := _content(value)) is not _MISSING else {}
    found = dict(getattr(value, "__dict__", {}))
    for owner in type(value).__mro__:
        slots = vars(owner).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if owner.__module__ != "builtins" and (inner := getattr(value, name, _MISSING)) is not _MISSING:
                found.setdefault(name, inner)
    return found


def _outside(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the cells of a function's closure, its defaults, and the generators among the globals that it names."""
    yield from zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((f"default {number}", default) for number, default in enumerate(function.__defaults__ or ()))
    for name in _names(function.__code__):
        if isinstance(inner := function.__globals__.get(name), _KINDS):
            yield name, inner


def _names(code: CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


@functools.cache
def _of_class(kind: type) -> list[tuple[str, Any]]:
    """Return the generators that a class and the functions in it hold."""
    found: dict[str, Any] = {}
    for owner in kind.__mro__:
        if owner.__module__.partition(".")[0] in _FOREIGN:
            continue
        for name, value in vars(owner).items():
            if isinstance(value, _KINDS):
                found.setdefault(name, value)
            elif isinstance(value, FunctionType):
                found |= {key: inner for key, inner in _outside(value) if isinstance(inner, _KINDS)}
    return list(found.items())


def _plain_values(value: Any) -> dict[Any, Any]:
    """Return the numbers, flags and texts that an object holds itself."""
    match value:
        case dict() | list() | deque():
            items = value.items() if isinstance(value, dict) else enumerate(value)
            found = dict(items) if len(value) <= _MAX_ITEMS else {}
        case tuple() | set() | functools.partial() | MethodType():
            return {}
        case _:
            found = _attributes(value)
    return {
        key: inner.item() if isinstance(inner, np.generic) else inner
        for key, inner in found.items()
        if type(inner) in _PLAIN or isinstance(inner, np.number | np.bool_)
        if not isinstance(inner, str) or len(inner) <= _MAX_CHARACTERS
        if type(key) in (str, int) and key != "training"
    }


def _is_same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other  # 1 is not True


def _set_values(value: Any, saved: Mapping[Any, Any]) -> None:
    """Set what an object holds, unless there is something now that is no number, flag or text."""
    is_container = isinstance(value, dict | list | deque)
    key: Any
    for key, wanted in saved.items():
        items: Any = dict(enumerate(value)) if isinstance(value, list | deque) else value
        items = items if is_container else _attributes(value)
        if key in items and type(items[key]) not in _PLAIN and not isinstance(items[key], np.generic):
            continue
        if isinstance(value, dict) or (is_container and key in items):
            value[key] = wanted
        elif is_container:
            continue
        elif hasattr(value, "__dict__") and (key in vars(value) or not hasattr(type(value), key)):
            vars(value)[key] = wanted  # without a setter, which may refuse it, as a DataLoader's does
        elif hasattr(type(value), key):
            object.__setattr__(value, key, wanted)


def _has_own_state(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, torch.nn.Module) or not (hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")):
        return False
    try:
        inspect.signature(value.state_dict).bind()
    except TypeError:  # a StreamingDataset's is asked for elsewhere
        return False
    return True


def _load(value: Any, state: Any, values: Mapping[Any, Any]) -> None:
    """Load a state of the start of an epoch.

    What it makes of a place that was reached then, such as at the end of the epoch before, begins to matter with an
    iteration only; so the attributes that loading has changed become what they were.
    """
    before = _plain_values(value)
    value.load_state_dict(copy.deepcopy(state))
    after = _plain_values(value)
    changed = {key for key in {*before, *after} if before.get(key, _MISSING) != after.get(key, _MISSING)}
    _set_values(value, {key: values[key] for key in changed if key in values})


def _generator_state(generator: Any) -> Any:
    match generator:
        case random.Random():
            return generator.getstate()
        case np.random.Generator():
            return generator.bit_generator.state
        case np.random.BitGenerator():
            return generator.state
        case np.random.RandomState():
            return generator.get_state(legacy=False)
        case _:
            return generator.get_state()


def _set_generator_state(generator: Any, state: Any) -> None:
    match generator:
        case random.Random():
            version, internal, gauss = state
            generator.setstate((version, tuple(internal), gauss))
        case np.random.Generator():
            generator.bit_generator.state = state
        case np.random.BitGenerator():
            generator.state = state
        case _:
            generator.set_state(state)


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _MISSING


def _owner(function: Any) -> object:
    """Return the generator of the process that a function of a module draws from."""
    return getattr(function, "__self__", None)
