"""Restricted unpickling, which can build plain data and nothing else.

A pickle is a program that names functions and calls them. It is loaded with four safeguards:

- `scan` walks its instructions without executing any, and refuses those that no checkpoint needs.
- Names are looked up in an allowlist and never imported.
- Keys that would take unbounded time to hash are refused before they are hashed.
- A pickle can set the state of a few kinds of objects only, and cannot copy much more than its own size.
"""

import io
import math
import pickle
import pickletools
import re

# Private to the standard library, but stable since 3.0. Needed because torch.save writes the names of Python 2.
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from itertools import islice
from numbers import Number
from typing import Any, ClassVar

from composer_checkpoint.errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError, shown

# Arguments that a call copies: one element takes at least one byte of the pickle.
_COPIED = (str, bytes, bytearray, list, tuple, dict, set, frozenset, deque)
_TIMES = 4
_ALWAYS_ALLOWED = 1 << 16  # a budget for the smallest pickles, which cannot use up memory with it

# The hash of a string is cached and depends on a secret of the process, and few floats or integers of up to 64 bits
# share a hash. The hashes of all other keys are predictable, so many keys can be made to collide. In addition, the hash
# of a tuple is computed on each use, over everything that it unfolds to: a tuple that contains another one twice, which
# contains a third one twice, and so on, takes 2**n steps. Therefore the number and size of such keys are limited.
_PLAIN_KEYS = frozenset([str, bytes, float, bool, type(None)])
_PREDICTABLE = (Number, tuple, frozenset, timedelta)
_MOST_KEYS = 1 << 12
_MOST_ELEMENTS = 1 << 6
_MOST_NUMBER = 1 << 64


def _is_small(key: Any) -> bool:
    """Return whether a key unfolds to few elements. The walk stops at the limit, since there may be any number."""
    left, pending = _MOST_ELEMENTS, [key]
    while pending and left > 0:
        inner = pending.pop()
        left -= 1
        if isinstance(inner, tuple | frozenset):
            pending.extend(islice(inner, left + 1))
        elif isinstance(inner, int):
            left -= inner.bit_length() >> 6  # a long integer counts one element per 64 bits
    return not pending and left >= 0


class Budget:
    """Budget for the copies that calls of a pickle make, a small multiple of its size, and for its keys."""

    __slots__ = ("_keys_left", "_left", "_limit")

    def __init__(self, size_bytes: int) -> None:
        self._left = self._limit = _TIMES * size_bytes + _ALWAYS_ALLOWED
        self._keys_left = _MOST_KEYS

    def charge(self, count: int) -> None:
        """Subtract a number of copied elements or bytes, and raise if the budget is exceeded."""
        self._left -= count
        if self._left < 0:
            raise CorruptCheckpointError(
                f"a pickle copies more than {self._limit} bytes and elements, {_TIMES} times its size: it was made "
                f"to use up the memory. Load another checkpoint."
            )

    def charge_keys(self, keys: Iterable[Any]) -> None:
        """Raise, before keys are hashed, if hashing and comparing them could take unbounded time."""
        for key in keys:
            is_plain = type(key) in _PLAIN_KEYS or (type(key) is int and -_MOST_NUMBER <= key <= _MOST_NUMBER)
            if is_plain or not isinstance(key, _PREDICTABLE):
                continue
            self._keys_left -= 1
            if self._keys_left < 0 or not _is_small(key):
                raise CorruptCheckpointError(
                    f"a pickle has keys that can be made to take endless time: tuples, sets or long numbers that "
                    f"unfold to more than {_MOST_ELEMENTS} elements, or more than {_MOST_KEYS} of them. Use text or "
                    f"short numbers as keys, or load another checkpoint."
                )


# Allowed instructions by the kind of their argument. The text instructions of protocol 0, INST, OBJ, PERSID, EXT and
# out-of-band buffers are left out: EXT, for example, uses a cache of the process that bypasses find_class().
_BARE = re.escape(b"()]}012NQRabdelstu\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94")
_FIXED_LENGTH_CODES = frozenset(b"Kqh\x80MJjG\x95r")
_STOP, _GLOBAL = b".c"

# The possessive *+ never backtracks, which would take memory for each instruction.
_FIXED_LENGTH = re.compile(rb"(?:[" + _BARE + rb"]|[Kqh\x80].|M..|[Jjr].{4}|[G\x95].{8})*+", re.DOTALL)
# Instructions with an argument of any length, and the size of the number that gives the length.
_LENGTH_BYTES = {**dict.fromkeys(b"\x8cUC\x8a", 1), **dict.fromkeys(b"XTB\x8b", 4), **dict.fromkeys(b"\x8d\x8e\x96", 8)}


def scan(data: bytes | memoryview, start: int = 0) -> int:
    """Walk a pickle's instructions without executing any, and return the position of its end."""
    position = start
    while True:
        match = _FIXED_LENGTH.match(data, position)
        assert match is not None  # the pattern also matches an empty run
        position = match.end()
        if position >= len(data):
            raise CorruptCheckpointError(
                f"a pickle breaks off at its byte {len(data) - start}. Load another checkpoint."
            )
        code = data[position]
        if code == _STOP:
            return position + 1
        position = _end_of_argument(data, position, code, start)


def _end_of_argument(data: bytes | memoryview, position: int, code: int, start: int) -> int:
    if code in _LENGTH_BYTES:
        begin = position + 1 + _LENGTH_BYTES[code]
        end = begin + int.from_bytes(data[position + 1 : begin], "little")
    elif code == _GLOBAL:
        match = _GLOBAL_NAME.match(data, position)
        end = match.end() if match else len(data) + 1
    else:
        raise _unknown_instruction(data, position, start)
    if end > len(data):
        raise CorruptCheckpointError(
            f"a pickle's instruction at byte {position - start} extends beyond the pickle. Load another checkpoint."
        )
    return end


# The length of names is limited, so that the search for their ends takes bounded time.
_GLOBAL_NAME = re.compile(rb"c([^\n]{0,400})\n([^\n]{0,400})\n")
_INSTRUCTIONS = {opcode.code: opcode for opcode in pickletools.opcodes}
_INST_NAME = re.compile(rb"i([^\n]{0,400})\n([^\n]{0,400})\n")


def _unknown_instruction(data: bytes | memoryview, position: int, start: int) -> CheckpointError:
    opcode = _INSTRUCTIONS.get(chr(data[position]))
    # Not an instruction of any protocol, so the file is more likely damaged than hostile.
    if opcode is None:
        return CorruptCheckpointError(
            f"a pickle has {data[position]:#04x} at byte {position - start}, which is not an instruction. "
            f"Load another checkpoint."
        )
    if data[position] in _FIXED_LENGTH_CODES:  # the pattern has matched those that are complete
        return CorruptCheckpointError(f"a pickle breaks off at its byte {position - start}. Load another checkpoint.")
    match = _INST_NAME.match(data, position)
    wanted = "" if match is None else f", to call {b'.'.join(match.groups()).decode(errors='replace')}"
    return UnsafeCheckpointError(
        f"a pickle uses the instruction {opcode.name} at byte {position - start}{wanted}. Checkpoints do not need it, "
        f"so nothing was run. Load a file that torch.save or this package wrote."
    )


def unknown_global(name: str) -> UnsafeCheckpointError:
    """Return the error for a global that is not on the allowlist."""
    return UnsafeCheckpointError(
        f"the file asks for {name} (global not in allowlist), which is refused; nothing of the file was run. If you "
        f"trust who wrote it, load it with trusted=True (Trainer(load_trusted=True), composer-ckpt convert --trust) "
        f"and save it again."
    )


def _bytes_of_latin1(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes are written as latin-1 text")
    return text.encode("latin-1")


def _bytes(value: Any = b"") -> bytes:
    if type(value) is not bytes:  # bytes(n) would allocate n zeros
        raise ValueError("bytes are made of bytes")
    return value


def _bytearray(value: Any = b"", encoding: Any = None) -> bytearray:
    if type(value) is bytes and encoding is None:
        return bytearray(value)
    return bytearray(_bytes_of_latin1(value, encoding))


class PickledText:
    """Stand-in for `TorchVersion`, a class that pickles instantiate, which becomes a plain string."""

    def __new__(cls, value: Any = "") -> str:  # pyright: ignore[reportInconsistentConstructor]
        """Return the string itself."""
        if type(value) is not str:  # str() of another object may be unbounded
            raise ValueError("a version is a text")
        return value


PLAIN_GLOBALS: Mapping[str, Any] = {
    "builtins.complex": complex,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.slice": slice,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytearray,
    "builtins.int": int,  # this and the next three are factories of a defaultdict
    "builtins.float": float,
    "builtins.list": list,
    "builtins.dict": dict,
    "collections.Counter": Counter,
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": defaultdict,
    "collections.deque": deque,
    "datetime.timedelta": timedelta,
    "_codecs.encode": _bytes_of_latin1,
}

State = Callable[[Any, Budget], Any]
"""Function of a state in a pickle and the pickle's budget, which returns the state to set, or raises."""


def any_state(state: Any, _: Budget) -> Any:
    """Return the state."""
    return state


def _dict_state(state: Any, _: Budget) -> Any:
    # Attributes could hide methods. Only a module's state dict has one.
    if type(state) is not dict or set(state) - {"_metadata"}:
        raise ValueError("a dict has no attributes")
    return state


# The unpickler written in Python, since the one in C hashes keys before a subclass could inspect them.
_PythonUnpickler: Any = pickle._Unpickler  # pyright: ignore[reportPrivateUsage]


def _guarded(instruction: bytes, guard: Callable[["RestrictedUnpickler"], object]) -> dict[int, Callable[[Any], None]]:
    """Return the entry in the dispatch table for an instruction with a check before it."""
    (code,) = instruction
    run = _PythonUnpickler.dispatch[code]

    def run_guarded(unpickler: Any) -> None:
        guard(unpickler)
        run(unpickler)

    return {code: run_guarded}


class RestrictedUnpickler(_PythonUnpickler):
    """Unpickler for pickles that have passed `scan`, which looks names up in a table.

    `states` has the classes whose instances may be given a state, with the function that checks it.
    """

    with_items: ClassVar[tuple[type, ...]] = (dict,)
    dispatch: ClassVar[Mapping[int, Callable[[Any], None]]] = {
        **_PythonUnpickler.dispatch,
        # The length of a frame is skipped: the whole pickle is in memory, so reading ahead has no use.
        pickle.FRAME[0]: lambda self: self.read(8),
        **_guarded(pickle.SETITEM, lambda self: self.charge_items(self.stack[-3], self.stack[-2:-1])),
        # For these four, the stack has only the objects pushed since the last mark.
        **_guarded(pickle.SETITEMS, lambda self: self.charge_items(self.metastack[-1][-1], self.stack[::2])),
        **_guarded(pickle.DICT, lambda self: self.budget.charge_keys(self.stack[::2])),
        **_guarded(pickle.ADDITEMS, lambda self: self.budget.charge_keys(self.stack)),
        **_guarded(pickle.FROZENSET, lambda self: self.budget.charge_keys(self.stack)),
        **_guarded(pickle.REDUCE, lambda self: self.charge_call(object, *self.stack[-2:])),
        **_guarded(pickle.NEWOBJ, lambda self: self.charge_call(type, *self.stack[-2:])),
        **_guarded(pickle.NEWOBJ_EX, lambda self: self.charge_call(type, *self.stack[-3:-1])),
        **_guarded(pickle.BUILD, lambda self: self.replace_state()),
    }

    def __init__(self, data: bytes | memoryview, table: Mapping[str, Any], states: Mapping[type, State]) -> None:
        self._file = io.BytesIO(data)
        super().__init__(self._file)
        self.table, self.states = table, {OrderedDict: _dict_state, **states}
        self.budget = Budget(len(data))

    def charge_items(self, target: Any, keys: list[Any]) -> None:
        """Charge the keys of items that are set; a slice as key could insert a list into itself repeatedly."""
        if not isinstance(target, self.with_items):
            raise ValueError(f"items are set in dicts, and not in a {type(target).__name__}")
        self.budget.charge_keys(keys)

    def charge_call(self, kind: type, function: Any, args: Any) -> None:
        """Charge a call of a function, or of a class, for the arguments that it copies."""
        # The base class also accepts other iterables, such as an array, each element of which would become an object.
        if not isinstance(args, tuple) or not isinstance(function, kind):
            raise ValueError("arguments are a tuple, and objects are made of classes")
        self.budget.charge(sum(len(arg) for arg in args if isinstance(arg, _COPIED)))
        for arg in args if isinstance(function, type) else ():
            # Each element of an array would become an object of about a hundred bytes.
            if hasattr(type(arg), "__iter__") and not isinstance(arg, _COPIED):
                raise ValueError(f"a container is made of other containers, and not of a {type(arg).__name__}")
            if issubclass(function, dict | set | frozenset) and isinstance(arg, _COPIED):
                self.budget.charge_keys(arg)
                # Older pickles create dicts from pairs.
                self.budget.charge_keys(item[0] for item in arg if isinstance(item, list | tuple) and item)

    def replace_state(self) -> None:
        """Replace a state on the stack by a checked one, or raise if the object may not be given any."""
        check = next((check for kind, check in self.states.items() if isinstance(self.stack[-2], kind)), None)
        if check is None:
            raise UnsafeCheckpointError(
                "a pickle tries to change an object, a function or a type that has no state in any checkpoint; nothing "
                "was changed. Load a file that torch.save or this package wrote."
            )
        self.stack[-1] = check(self.stack[-1], self.budget)

    def load(self) -> Any:
        """Return the object. Unlike the base class, read directly from the file and ignore frames."""
        self.read, self.readinto, self.readline = self._file.read, self._file.readinto, self._file.readline
        self.metastack: list[list[Any]] = []
        self.stack: list[Any] = []
        self.append = self.stack.append
        self.proto = 0
        read, dispatch = self.read, self.dispatch
        try:
            while True:
                dispatch[read(1)[0]](self)
        except pickle._Stop as stop:  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
            return stop.value

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return the object that the table has for a name."""
        name = canonical_name(module_name, global_name)
        return self.table[name] if name in self.table else self.find_unknown(name)

    def find_unknown(self, name: str) -> Any:
        """Refuse a name that is missing from the table."""
        raise unknown_global(name)

    def persistent_load(self, pid: Any, /) -> Any:
        """Refuse references to objects outside the pickle."""
        raise UnsafeCheckpointError(
            f"a pickle refers to {shown(pid)}, an unknown object outside of it. Nothing of it was run."
        )


def canonical_name(module: str, name: str) -> str:
    """Return the name of a global in the spelling of Python 3 and NumPy 2."""
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    if module.startswith("numpy.core."):
        module = module.replace(".core.", "._core.", 1)
    return f"{module}.{name}"


def run_restricted(unpickler: RestrictedUnpickler) -> Any:
    """Run an unpickler, and raise any error of a damaged pickle as a `CorruptCheckpointError`."""
    try:
        return unpickler.load()
    except (UnsafeCheckpointError, CorruptCheckpointError):
        raise
    except Exception as error:
        raise CorruptCheckpointError(
            f"a pickle cannot be followed: {type(error).__name__}: {error!s:.200}. Load another checkpoint."
        ) from error


# A view may repeat elements, such as an expanded mask. That costs nothing until the view is copied.
MAX_EXPANDED_VIEW_BYTES = 64 << 20
_MAX_DIMS = 64


def check_geometry(name: str, size: Any, stride: Any, offset: Any, storage_numel: int, item_bytes: int) -> None:
    """Refuse a tensor that exceeds its storage or expands a few bytes to a huge view."""
    numbers = (*size, *stride, offset)
    if (
        len(size) != len(stride)
        or len(size) > _MAX_DIMS
        or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)
    ):
        raise CorruptCheckpointError(
            f"{name} has shape {shown(tuple(size))}, stride {shown(tuple(stride))} and offset {shown(offset)}: these "
            f"are not equally many whole numbers from 0 for at most {_MAX_DIMS} dims. Load another checkpoint."
        )
    numel = math.prod(size)
    if numel == 0:  # reads nothing, so offset and strides do not matter
        return
    # One past the largest index that the strides reach.
    needed = offset + 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    if needed > storage_numel:
        raise CorruptCheckpointError(
            f"{name} of shape {shown(tuple(size))} and stride {shown(tuple(stride))} needs {needed} elements, and the "
            f"file has {storage_numel} for it. Load another checkpoint."
        )
    if numel > storage_numel and numel * item_bytes > MAX_EXPANDED_VIEW_BYTES:
        raise CorruptCheckpointError(
            f"{name} of shape {shown(tuple(size))} and stride {shown(tuple(stride))} repeats {storage_numel} elements "
            f"into {numel * item_bytes} bytes, more than the {MAX_EXPANDED_VIEW_BYTES} that a view may repeat. If it "
            f"is meant to be so large, save it with .contiguous()."
        )
