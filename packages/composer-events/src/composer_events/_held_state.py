# pyright: basic
"""State inside a dataloader that changes from epoch to epoch, or as it is read.

The parts of a dataloader are all objects that can be reached from it through attributes, items, arguments, closures and
the globals that its methods name. A checkpoint keeps their random number generators, the results of their `state_dict`,
and the counters and orders of samplers.
"""

import copy
import functools
import inspect
import logging
import marshal
import random
import sys
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

__all__ = ["HeldState", "holds_generators", "holds_state", "set_epoch_everywhere"]

_KINDS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
_LEAVES = (str, bytes, int, float, bool, type(None), type, ModuleType, BuiltinFunctionType, np.ndarray, torch.Tensor)
_NOT_DATA = (logging.Logger, torch.optim.Optimizer, random.SystemRandom)
_NUMBERS = (int, float)  # exact types, so that bool is excluded
_PLAIN = (int, float, bool, str)
_UNSET = (int, bool, type(None))
_FOREIGN = frozenset({"torch", "numpy", *sys.stdlib_module_names} - {"__main__"})  # their classes hold no generators
_MAX_OBJECTS = 5_000
_MAX_ITEMS = 1_000  # a dataset may list millions of similar samples, but has few transforms
_MISSING = object()
_refusing = set[type]()  # types whose `set_epoch` has raised


@dataclass(frozen=True, slots=True)
class _Part:
    """An object of a dataloader.

    Attributes:
        name: The path to it from the dataloader.
        value: The object.
        role: `"loads"` for parts of the dataset and of `collate_fn`, `"chooses"` for parts of the samplers.
    """

    name: str
    value: Any
    role: str


class HeldState:
    """Capture and restore the state of the parts of one dataloader.

    Args:
        loader: The dataloader at the start of the run, before any listener changes it.
        only_generators: Whether to keep generators only, for a dataloader that saves everything else itself.
    """

    def __init__(self, loader: Any, only_generators: bool = False) -> None:
        self.loader = loader
        self._only_generators = only_generators
        self._first = {name: _mark(_kept(inner)) for name, inner in self._of_samplers()}
        self._warned = set[str]()
        self._listened = set[str]()

    def capture(self) -> dict[str, Any]:
        """Return the state for a checkpoint, without empty entries.

        Of numbers and orders, only those are kept that have changed since the run began; settings are not kept.
        """
        found: dict[str, dict[str, Any]] = {"generators": {}, "objects": {}, "numbers": {}}
        for part in _parts(self.loader):
            if isinstance(part.value, _KINDS):
                found["generators"][part.name] = _generator_state(part.value)
            elif not self._only_generators and part.value is not self.loader and _has_own_state(part.value):
                try:
                    # Copied, since the object may continue to change the containers that it returns.
                    state = copy.deepcopy(part.value.state_dict())
                except Exception as error:
                    self._warn_of_state(part.name, error)
                else:
                    items = _attributes(part.value).items()
                    unset = {key: inner for key, inner in items if type(inner) in _UNSET and not inner}
                    found["objects"][part.name] = {"state": state, "unset": unset}
        settings = self.settings() if self._listened else {}
        found["listened"] = {name: settings[name] for name in self._listened if name in settings}
        numbers = {} if self._only_generators else self.numbers()
        # A number that replaced `None`, such as a file descriptor, is not a counter.
        changed = {name: now for name, now in numbers.items() if self._has_changed(name, now)}
        if changed:
            found["numbers"] = {"changed": changed, "rest": self._rest()}
        return {kind: entries for kind, entries in found.items() if entries}

    def restore(self, saved: Mapping[str, Any], *, role: str | None = None) -> None:
        """Restore a captured state, of the parts with a role or of all parts."""
        parts = [part for part in _parts(self.loader) if role in (None, part.role)]
        objects = {} if self._only_generators else saved.get("objects", {})
        # States first: loading one may change the settings and numbers that are set below.
        for part in parts:
            if part.name in objects:
                _load(part.value, **objects[part.name])
        if role != "chooses":
            self._restore_settings(parts, saved.get("listened", {}))
        numbers = saved.get("numbers")
        if numbers and role != "loads":
            changed = numbers["changed"]
            self.set_numbers({name: value for name, value in changed.items() if isinstance(value, bytes)})
            # Next to a flag that differs, or an order of another length, a number may be wrong: a sampler that sorted
            # its samples in the first epoch would look for an order that it has not kept.
            if numbers["rest"] == self._rest():
                self.set_numbers(changed)
        for part in parts:
            # Last, since loading a state may draw from a generator.
            if isinstance(part.value, _KINDS) and part.name in saved.get("generators", {}):
                _set_generator_state(part.value, saved["generators"][part.name])

    def _restore_settings(self, parts: Iterable[_Part], settings: Mapping[str, Any]) -> None:
        values = {part.name: part.value for part in parts}
        for name, setting in settings.items():
            owner, _, key = name.rpartition(".")
            if owner in values:
                object.__setattr__(values[owner], key, setting)
                self._listened.add(name)

    def numbers(self) -> dict[str, Any]:
        """Return the numbers that samplers and their parts hold as attributes, and their orders as bytes."""
        return {name: kept for name, inner in self._of_samplers() if (kept := _kept(inner)) is not None}

    def set_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Set attributes of samplers and their parts, except those that now have another type or length."""
        parts = {part.name: part.value for part in _parts(self.loader)}
        for name, number in numbers.items():
            owner, _, key = name.rpartition(".")
            if owner not in parts:
                continue
            now = _attributes(parts[owner]).get(key, number)
            if isinstance(number, bytes):
                _set_order(now, np.frombuffer(number, np.int64))
            # Bypasses the `__setattr__` of frozen dataclasses and of properties with side effects.
            elif type(now) in _NUMBERS:
                object.__setattr__(parts[owner], key, number)

    def settings(self) -> dict[str, Any]:
        """Return the numbers, flags and strings that datasets, `collate_fn` and their parts hold as attributes."""
        if self._only_generators:
            return {}
        held = (
            (part, *item)
            for part in _parts(self.loader)
            if part.role == "loads"
            for item in _attributes(part.value).items()
        )
        return {f"{part.name}.{key}": inner for part, key, inner in held if type(inner) in _PLAIN}

    def note_listeners(self, before: Mapping[str, Any]) -> None:
        """Record the settings that listeners have changed: they are not called again on a resume inside the epoch."""
        now = self.settings()
        self._listened |= {name for name in now.keys() & before.keys() if now[name] != before[name]}

    def _has_changed(self, name: str, now: Any) -> bool:
        first = self._first.get(name, _MISSING)
        if isinstance(now, bytes):  # an order that is new or has another length is derived from something else
            return isinstance(first, tuple) and first[0] == len(now) and first != _mark(now)
        return first not in (None, now)

    def _of_samplers(self) -> list[tuple[str, Any]]:
        parts = [part for part in _parts(self.loader) if part.role == "chooses"]
        return [(f"{part.name}.{key}", inner) for part in parts for key, inner in _attributes(part.value).items()]

    def _rest(self) -> int:
        """Return a hash of everything but numbers that samplers and their parts hold as attributes."""
        rest = ((name, inner) for name, inner in self._of_samplers() if type(inner) not in _NUMBERS)
        contents = sorted((name, zlib.crc32(_content_of(inner))) for name, inner in rest)
        return zlib.crc32(repr(contents).encode())

    def missing(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the names of saved generators and stateful objects that the dataloader does not have."""
        kinds = {part.name: type(part.value) for part in _parts(self.loader)}
        return [name for kind in ("generators", "objects") for name in saved.get(kind, ()) if name not in kinds]

    def warn_of_copies(self) -> None:
        """Warn once if `set_epoch` would not reach the copies of the dataset or `collate_fn` in worker processes."""
        names = [part.name for part in _parts(self.loader) if part.role == "loads" and _takes_epoch(part.value)]
        if names and not self._warned.issuperset(names):
            self._warned.update(names)
            warnings.warn(
                f"train_dataloader.{' and '.join(names)} defines set_epoch, and the worker processes of a "
                f"{type(self.loader).__name__} with persistent_workers=True keep copies that have the number of the "
                "epoch in which they were started. Leave persistent_workers=True out, or use torch's DataLoader.",
                stacklevel=2,
            )

    def shares_generators(self) -> bool:
        """Return whether a sampler and the dataset or `collate_fn` draw from the same generator."""
        parts = _parts(self.loader)
        loading = {id(part.value) for part in parts if part.role == "loads" and isinstance(part.value, _KINDS)}
        others = [part.value for part in parts if part.role != "loads"]
        return any(id(inner) in loading for value in others for _, inner in _inside(value))

    def savable(self, captured: Mapping[str, Any], check: Callable[[Any, str], object]) -> dict[str, Any]:
        """Return a captured state without the objects whose state `check(state, name)` rejects by raising."""
        kept = dict(captured)
        for name, entry in kept.pop("objects", {}).items():
            try:
                check(entry["state"], name)
            except Exception as error:  # pickling the state may raise anything
                self._warn_of_state(name, error)
            else:
                kept.setdefault("objects", {})[name] = entry
        return kept

    def _warn_of_state(self, name: str, error: Exception) -> None:
        if name in self._warned:
            return
        self._warned.add(name)
        kind = next((type(part.value).__name__ for part in _parts(self.loader) if part.name == name), "part")
        warnings.warn(
            f"The state of train_dataloader.{name}, a {kind}, is not in the checkpoints, so a resumed run may read "
            f"other samples: {type(error).__name__}: {error} Its state_dict() must return numbers, strings, tensors, "
            "and lists and dicts of these, at any time.",
            stacklevel=2,
        )


def set_epoch_everywhere(holder: Any, epoch: int, done: Iterable[object] = ()) -> list[object]:
    """Call `set_epoch` on the parts of a dataloader that define it, the innermost first, and return these parts."""
    has_it = {id(part) for part in done}
    # Reversed, so that the call on a container, which may set its parts too, comes after theirs.
    found = [part.value for part in reversed(_parts(holder)) if _takes_epoch(part.value)]
    for part in found:
        if id(part) not in has_it:
            try:
                part.set_epoch(epoch)
            except Exception as error:  # it may need more arguments and serve another purpose
                if type(part) not in _refusing:
                    _refusing.add(type(part))
                    warnings.warn(
                        f"{type(part).__name__}.set_epoch({epoch}) raised {type(error).__name__}: {error} Training "
                        "continues, and may read the same order in each epoch. It must take only the epoch number.",
                        stacklevel=2,
                    )
    return found


def _takes_epoch(value: object) -> bool:
    return callable(getattr(type(value), "set_epoch", None))


def holds_generators(*holders: object) -> bool:
    """Return whether objects hold random number generators in attributes, arguments, closures, or nested objects.

    The global generators do not count. The search stops after a fixed number of objects.

    Example:
        >>> holds_generators({"transforms": [random.Random(3)]}), holds_generators([torch.rand(2), random.uniform])
        (True, False)
    """
    return any(isinstance(part.value, _KINDS) for part in _parts(holders))


def holds_state(*holders: object) -> bool:
    """Return whether objects hold random number generators, or objects with `state_dict` and `load_state_dict`."""
    return any(isinstance(part.value, _KINDS) or _has_own_state(part.value) for part in _parts(holders))


def _parts(loader: Any) -> list[_Part]:
    """Return the parts of a dataloader, those that load samples first, and each part before what it holds."""
    found: list[_Part] = []
    # The global generators, which checkpoints keep elsewhere.
    functions: tuple[Any, ...] = (random.random, np.random.rand)
    # A script may have put another function in the place of one, such as a test that makes random numbers known.
    seen = {*(id(getattr(function, "__self__", None)) for function in functions), id(torch.default_generator)}
    starts: dict[str, tuple[str, ...]] = {"": ()}
    if isinstance(loader, DataLoader):
        starts = {"loads": ("dataset", "collate_fn"), "chooses": ("sampler", "batch_sampler"), "": ()}
    for role, names in starts.items():
        waiting = deque([(name, getattr(loader, name)) for name in names] or [("", loader)])
        limit = len(found) + _MAX_OBJECTS
        while waiting and len(found) < limit:
            name, value = waiting.popleft()
            if isinstance(value, _LEAVES) or id(value) in seen or not _is_data(value):
                continue
            seen.add(id(value))
            found.append(_Part(name, value, role))
            if not isinstance(value, _KINDS):
                waiting.extend((f"{name}.{key}" if name else str(key), inner) for key, inner in _inside(value))
    return found


def _is_data(value: Any) -> bool:
    # These would lead to the whole training state.
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
        case DataLoader():  # `_iterator` holds its workers
            return [(key, inner) for key, inner in _attributes(value).items() if key != "_iterator"]
        case _:
            return [*_attributes(value).items(), *_of_class(type(value))]


def _attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes from its dict and its slots, or the content of a closure's cell."""
    if isinstance(value, CellType):
        try:
            return {"cell_contents": value.cell_contents}
        except ValueError:  # the cell is still empty
            return {}
    found = dict(getattr(value, "__dict__", {}))
    for owner in type(value).__mro__:
        slots = vars(owner).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if owner.__module__ != "builtins" and (inner := getattr(value, name, _MISSING)) is not _MISSING:
                found.setdefault(name, inner)
    return found


def _outside(function: FunctionType, seen: frozenset[FunctionType] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Yield a function's closure and defaults, and the generators that it and the functions it calls name."""
    yield from zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((f"default {number}", default) for number, default in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    for name in _names(function.__code__):
        inner = function.__globals__.get(name)
        if isinstance(inner, _KINDS):
            yield name, inner
        elif isinstance(inner, FunctionType) and inner not in seen and not _is_foreign(inner):
            of_helper = _outside(inner, seen | {function})
            yield from ((f"{name}.{key}", generator) for key, generator in of_helper if isinstance(generator, _KINDS))


def _is_foreign(value: Any) -> bool:
    return value.__module__.partition(".")[0] in _FOREIGN


def _names(code: CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


@functools.cache
def _of_class(kind: type) -> list[tuple[str, Any]]:
    """Return the generators that a class and the functions in it hold."""
    found: dict[str, Any] = {}
    for owner in kind.__mro__:
        if _is_foreign(owner):
            continue
        for name, value in vars(owner).items():
            # The function of a static method or property.
            value = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(value, _KINDS):
                found.setdefault(name, value)
            elif isinstance(value, FunctionType):
                found |= {key: inner for key, inner in _outside(value) if isinstance(inner, _KINDS)}
    return list(found.items())


def _kept(value: Any) -> Any:
    """Return a number, or the integers of a list, array or tensor as bytes; `None` for other values."""
    if type(value) in _NUMBERS:
        return value
    if not isinstance(value, list | np.ndarray | torch.Tensor):
        return None
    if isinstance(value, list) and not (value and type(value[0]) is int):
        return None
    try:
        order: Any = np.asarray(value)
    except Exception:  # nested lists and tensors on devices raise various errors
        return None
    return order.astype(np.int64).tobytes() if order.ndim == 1 and order.dtype.kind == "i" else None


def _mark(kept: Any) -> Any:
    # An order may have millions of items, and is kept only to notice a change.
    return (len(kept), zlib.crc32(kept)) if isinstance(kept, bytes) else kept


def _set_order(value: Any, order: Any) -> None:
    """Copy an order into a list, array or tensor of the same length, in place since another part may share it."""
    if not isinstance(value, list | np.ndarray | torch.Tensor) or len(value) != len(order):
        return
    if isinstance(value, list):
        value[:] = order.tolist()
    elif isinstance(value, torch.Tensor):
        value.copy_(torch.from_numpy(order.copy()))
    elif value.flags.writeable:
        value[...] = order


def _content_of(value: Any) -> bytes:
    """Return bytes that are equal for equal values in every process: the data of plain values, the type of others."""
    try:
        value = value.numpy(force=True) if isinstance(value, torch.Tensor) else value
        return marshal.dumps(value, 2)  # version 2 does not encode object identity
    except Exception:  # marshal supports plain data only
        return type(value).__name__.encode()


def _has_own_state(value: Any) -> bool:
    kind = type(value)
    # The state of a module is its weights.
    if isinstance(value, torch.nn.Module) or not (hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")):
        return False
    try:
        inspect.signature(value.state_dict).bind()
    except TypeError:  # a StreamingDataset's takes arguments, and is called elsewhere
        return False
    return True


def _load(value: Any, state: Any, unset: Mapping[str, Any]) -> None:
    """Load a state from the start of an epoch, and reset attributes that were unset at that time.

    A loaded state may set a position at which the next iteration continues, although the saved epoch began at its
    start.
    """
    before = _attributes(value)
    value.load_state_dict(copy.deepcopy(state))
    now = _attributes(value)
    for key, wanted in unset.items():
        if key in now and now[key] is not before.get(key, _MISSING):
            object.__setattr__(value, key, wanted)


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
            version, internal, gauss = state  # setstate() refuses a list, as which a file may return the tuple
            generator.setstate((version, tuple(internal), gauss))
        case np.random.Generator():
            generator.bit_generator.state = state
        case np.random.BitGenerator():
            generator.state = state
        case _:
            generator.set_state(state)
