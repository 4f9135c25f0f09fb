"""Bounds on the work of hashing the keys of a pickle, computed without building any object.

Dicts and sets hash their keys, and compare those with equal hashes. The hash of a text is cached and depends on a
secret of the process. The hashes of tuples and numbers are predictable, so many keys can be made to collide. The hash
of a tuple is computed on each use, over everything it contains: a tuple that contains another twice, which contains a
third twice, takes 2**n steps, and one with a million levels a million nested calls. Neither can be interrupted.
"""

from array import array
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from composer_checkpoint.errors import CorruptCheckpointError

__all__ = ["LENGTH_BYTES", "KeyBudget", "check_keys"]

# Weight limits of keys that are neither text nor short numbers: for all of them, and the minimum and maximum of each.
# The weight of a key is the number of elements it unfolds to. The minimum limits the number of such keys to 4096.
_MAX_WEIGHT = 1 << 18
_LEAST_WEIGHT = 1 << 6
_MOST_WEIGHT = 1 << 12
# Assumed weight of a call's result, which is not built here: a set may be made of a list that is filled later.
_WEIGHT_OF_RESULT = _LEAST_WEIGHT

_SHORT_NUMBER_BYTES = 9

# Instructions that push a new object, with their size, or the size of their argument's length.
_FIXED_PUSHES = {**dict.fromkeys(b"N]}\x88\x89\x8f", 1), ord("K"): 2, ord("M"): 3, ord("J"): 5, ord("G"): 9}
LENGTH_BYTES = {
    **dict.fromkeys(b"\x8cUC\x8a", 1),
    **dict.fromkeys(b"XTB\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
_LONG_NUMBERS = frozenset(b"\x8a\x8b")
_INDEX_BYTES = {ord("q"): 1, ord("h"): 1, ord("r"): 4, ord("j"): 4}
_SKIPPED_BYTES = {0x80: 1, 0x95: 8}  # the protocol, and the length of a frame
_STOP, _GLOBAL = b".c"


class KeyBudget:
    """Budget for the weight of a pickle's keys.

    Args:
        has_heavy_keys: Whether a key may be, or contain, the result of a call.
    """

    __slots__ = ("_has_heavy_keys", "_left")

    def __init__(self, *, has_heavy_keys: bool = False) -> None:
        self._left = _MAX_WEIGHT
        self._has_heavy_keys = has_heavy_keys

    def charge(self, weight: int) -> None:
        """Subtract the weight of a key from the budget; cheap keys weigh nothing.

        Raises:
            CorruptCheckpointError: If the key is too heavy, or the budget is exceeded.
        """
        if not weight:
            return
        self._left -= max(weight, _LEAST_WEIGHT)
        if weight > _MOST_WEIGHT or self._left < 0:
            raise CorruptCheckpointError(
                f"a pickle has keys that can be made to take endless time: tuples, sets or long numbers that unfold to "
                f"more than {_MOST_WEIGHT} elements, or too many of them, more than {_MAX_WEIGHT} elements in all. Use "
                f"text or short numbers as keys, or load another checkpoint."
            )

    def charge_all(self, values: Iterable[Any]) -> None:
        """Subtract the weights of values that a call will use as keys."""
        for value in values:
            if type(value) not in (str, bytes, float, bool, type(None)):
                self.charge(_weight_of(value, _MOST_WEIGHT))

    def check_result(self, value: frozenset[Any]) -> None:
        """Compare a set that a call has built with its assumed weight, if the result of a call may be a key.

        Raises:
            CorruptCheckpointError: If the set is too large.
        """
        if self._has_heavy_keys and _weight_of(value, _WEIGHT_OF_RESULT) > _WEIGHT_OF_RESULT:
            raise CorruptCheckpointError(
                f"a pickle has keys that can be made to take endless time: a set of more than {_WEIGHT_OF_RESULT} "
                f"elements, and keys of which it may be one. Use text or numbers as keys, or load another checkpoint."
            )


def _weight_of(value: Any, most: int) -> int:
    """Return the weight of an existing object, or, if it is heavier, a number greater than `most`."""
    if isinstance(value, int):
        return _weight_of_number((value.bit_length() + 8) // 8)
    weight, pending = 0, [value]
    # Stops at the limit, since a small tuple may unfold to an endless number of elements.
    while pending and weight + len(pending) <= most:
        inner = pending.pop()
        weight += 1
        if isinstance(inner, tuple | frozenset):
            pending.extend(islice(inner, most + 1))
        elif isinstance(inner, int):
            weight += _weight_of_number((inner.bit_length() + 8) // 8)
    return weight + len(pending)


def _weight_of_number(size_bytes: int) -> int:
    # The time to hash a number is proportional to its length.
    return 0 if size_bytes <= _SHORT_NUMBER_BYTES else min(1 + size_bytes // 8, _MOST_WEIGHT + 1)


def check_keys(data: bytes | memoryview) -> bool:
    """Follow a pickle that has passed `scan`, and refuse keys that would take unbounded time.

    Returns:
        Whether a key may be, or contain, the result of a call.

    Raises:
        CorruptCheckpointError: If there are such keys, or an instruction lacks its operands.
    """
    # A simulation of the unpickler in which each object is only its weight as a key.
    machine = _Machine()
    push, do = machine.stack.append, machine.steps()
    position = 0
    try:
        while (code := data[position]) != _STOP:
            if size_bytes := _FIXED_PUSHES.get(code):
                push(0)
                position += size_bytes
            elif code in _INDEX_BYTES:
                begin = position + 1 + _INDEX_BYTES[code]
                do[code](int.from_bytes(data[position + 1 : begin], "little"))
                position = begin
            elif code in do:
                do[code]()
                position += 1
            elif code in LENGTH_BYTES:
                begin = position + 1 + LENGTH_BYTES[code]
                size_bytes = int.from_bytes(data[position + 1 : begin], "little")
                push(_weight_of_number(size_bytes) if code in _LONG_NUMBERS else 0)
                position = begin + size_bytes
            elif code == _GLOBAL:
                push(0)
                position = _after_lines(data, position)
            else:
                position += 1 + _SKIPPED_BYTES.get(code, 0)
    except IndexError as error:
        raise CorruptCheckpointError("a pickle cannot be followed: it lacks what it works on.") from error
    return machine.has_heavy_keys


def _after_lines(data: bytes | memoryview, position: int) -> int:
    """Return the position after the names of a module and a class."""
    first, second = bytes(data[position : position + 1000]).split(b"\n", 2)[:2]
    return position + len(first) + len(second) + 2


class _Machine:
    """Stack and memo of a pickle, with objects represented by their weights as keys."""

    __slots__ = ("budget", "has_heavy_keys", "marks", "memo", "memo_count", "stack")

    def __init__(self) -> None:
        self.stack: list[int] = []
        self.marks: list[int] = []
        self.memo = array("H")  # by index: weight plus one, or 0 for an unused index
        self.memo_count = 0
        self.budget = KeyBudget()
        self.has_heavy_keys = False

    def steps(self) -> dict[int, Callable[..., object]]:
        """Return the functions for instructions that do more than push a new object."""
        pop, push = self.stack.pop, self.stack.append
        by_letter: dict[str, Callable[..., object]] = {
            "(": lambda: self.marks.append(len(self.stack)),
            "0": lambda: self.marks.pop() if self.marks[-1:] == [len(self.stack)] else pop(),
            "1": self.since_mark,
            "2": lambda: push(self.stack[-1]),
            "h": lambda index: push(self.memo[index] - 1),
            "j": lambda index: push(self.memo[index] - 1),
            "q": self.remember,
            "r": self.remember,
            "\x94": lambda: self.remember(self.memo_count),
            ")": lambda: push(1),
            "t": lambda: push(_weight_of_tuple(self.since_mark())),
            "\x85": lambda: push(_weight_of_tuple([pop()])),
            "\x86": lambda: push(_weight_of_tuple([pop(), pop()])),
            "\x87": lambda: push(_weight_of_tuple([pop(), pop(), pop()])),
            "l": lambda: (self.since_mark(), push(0)),
            "d": lambda: (self.charge(self.since_mark()[::2]), push(0)),
            "s": lambda: (pop(), self.charge_one(pop())),
            "u": lambda: self.charge(self.since_mark()[::2]),
            "\x90": lambda: self.charge(self.since_mark()),
            "\x91": lambda: push(self.charge(self.since_mark())),
            "a": pop,
            "e": self.since_mark,
            "b": pop,
            "R": lambda: (push(max(_weight_of_tuple([pop()]), _WEIGHT_OF_RESULT)), pop(-2)),
            "Q": lambda: (pop(), push(0)),
            "\x81": lambda: (pop(), pop(), push(0)),
            "\x92": lambda: (pop(), pop(), pop(), push(0)),
            "\x93": lambda: (pop(), pop(), push(0)),
        }
        return {ord(letter): step for letter, step in by_letter.items()}

    def since_mark(self) -> list[int]:
        """Pop the last mark and everything above it."""
        mark = self.marks.pop()
        taken = self.stack[mark:]
        del self.stack[mark:]
        return taken

    def remember(self, index: int) -> None:
        """Store the top of the stack in the memo."""
        memo = self.memo
        if index >= len(memo):
            # At least doubled, so that growing takes linear time in all.
            memo.frombytes(bytes(memo.itemsize * max(index + 1 - len(memo), len(memo))))
        if not memo[index]:
            self.memo_count += 1
        memo[index] = self.stack[-1] + 1

    def charge_one(self, weight: int) -> None:
        """Use an object as a key."""
        self.budget.charge(weight)
        self.has_heavy_keys = self.has_heavy_keys or weight >= _WEIGHT_OF_RESULT

    def charge(self, weights: list[int]) -> int:
        """Use objects as keys, and return the weight of a set of them that is itself a key."""
        for weight in weights:
            self.charge_one(weight)
        return _weight_of_tuple(weights)


def _weight_of_tuple(weights: list[int]) -> int:
    return min(1 + len(weights) + sum(weights), _MOST_WEIGHT + 1)
