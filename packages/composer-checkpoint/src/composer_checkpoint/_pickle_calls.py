"""What a pickle gets for the name of a function or a container: it can be called, and neither changed nor overused.

An instruction of pickles, BUILD, sets attributes of whatever lies on the stack, also of a function or class that other
loads of this process will need. And few bytes that are copied often become many.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from composer_checkpoint._pickled_keys import KeyBudget
from composer_checkpoint.errors import CorruptCheckpointError, UnsafeCheckpointError

__all__ = ["Budget", "Call", "Unchangeable"]

# What is copied when it is an argument: one element is at least one byte of the pickle.
_COPIED = (str, bytes, bytearray, list, tuple, dict, set, frozenset, deque)
_TIMES = 4
_ALWAYS_ALLOWED = 1 << 16


class Budget:
    """How much the calls of one pickle may copy: a few times what it has itself; and what its keys may weigh."""

    __slots__ = ("_left", "_limit", "keys")

    def __init__(self, size_bytes: int, *, has_heavy_keys: bool) -> None:
        self.keys = KeyBudget(has_heavy_keys=has_heavy_keys)
        self._left = self._limit = _TIMES * size_bytes + _ALWAYS_ALLOWED

    def charge(self, count: int) -> None:
        """Take so many elements or bytes from what is left.

        Raises:
            CorruptCheckpointError: If nothing is left.
        """
        self._left -= count
        if self._left < 0:
            raise CorruptCheckpointError(
                f"a pickle copies more than {self._limit} bytes and elements, {_TIMES} times what it has: it was made "
                f"to use up the memory. Load another checkpoint."
            )


class Unchangeable:
    """A thing that no instruction gives another state."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> NoReturn:
        raise UnsafeCheckpointError(
            "a pickle tries to change a function or a type that it names, as no checkpoint does; nothing was changed. "
            "Load a file that torch.save or this package wrote."
        )


class Call(Unchangeable):
    """A function or class that can be called by one pickle, and no more."""

    __slots__ = ("_budget", "_function")

    def __init__(self, function: Callable[..., Any], budget: Budget) -> None:
        self._function = function
        self._budget = budget

    def __call__(self, *args: Any) -> Any:
        self._budget.charge(sum(len(arg) for arg in args if isinstance(arg, _COPIED)))
        if isinstance(self._function, type):
            _refuse_arrays(args)
            if issubclass(self._function, dict | set | frozenset):
                self._charge_keys(args, of_pairs=issubclass(self._function, dict))
        made = self._function(*map(Call.itself, args))  # a defaultdict is given a class
        if isinstance(made, frozenset):
            self._budget.keys.check_result(made)
        return made

    def _charge_keys(self, args: tuple[Any, ...], *, of_pairs: bool) -> None:
        for arg in args:
            if isinstance(arg, _COPIED):
                self._budget.keys.charge_all(arg)
                if of_pairs:  # as older pickles fill dicts
                    self._budget.keys.charge_all(item[0] for item in arg if isinstance(item, list | tuple) and item)

    @staticmethod
    def itself(value: Any) -> Any:
        """Return the function that a call stands for, and anything else as it is."""
        return value._function if type(value) is Call else value


def _refuse_arrays(args: tuple[Any, ...]) -> None:
    """Refuse what would become an object of some hundred bytes for each of its elements."""
    for arg in args:
        if hasattr(type(arg), "__iter__") and not isinstance(arg, _COPIED):
            raise ValueError(f"a container is made of other containers, and not of a {type(arg).__name__}")
