"""A list that counts its changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex, TypeVar, overload

__all__ = ["WatchedList"]

T = TypeVar("T")


class WatchedList(list[T]):
    """A list whose `version` grows with every change, so that what was derived from it can be kept until then.

    An item that changes in itself does not count. A state that has such lists keeps each of them for life and replaces
    only its contents, so whoever holds the list need not ask the state for it again.

    Example:
        >>> numbers = WatchedList([2, 1])
        >>> before = numbers.version
        >>> numbers.sort()
        >>> numbers.version > before
        True
    """

    # On the class, because pickle and copy fill the list before it has an attribute of its own.
    version: int = 0

    def append(self, item: T, /) -> None:
        self.version += 1
        super().append(item)

    def extend(self, items: Iterable[T], /) -> None:
        self.version += 1
        super().extend(items)

    def insert(self, index: SupportsIndex, item: T, /) -> None:
        self.version += 1
        super().insert(index, item)

    def remove(self, item: T, /) -> None:
        self.version += 1
        super().remove(item)

    def pop(self, index: SupportsIndex = -1, /) -> T:
        self.version += 1
        return super().pop(index)

    def clear(self) -> None:
        self.version += 1
        super().clear()

    def reverse(self) -> None:
        self.version += 1
        super().reverse()

    def sort(self, *, key: Callable[[T], Any] | None = None, reverse: bool = False) -> None:
        self.version += 1
        super().sort(key=key, reverse=reverse)  # pyright: ignore[reportArgumentType, reportCallIssue]  # as list has it

    @overload
    def __setitem__(self, index: SupportsIndex, item: T, /) -> None: ...
    @overload
    def __setitem__(self, index: slice, item: Iterable[T], /) -> None: ...
    def __setitem__(self, index: Any, item: Any, /) -> None:
        self.version += 1
        super().__setitem__(index, item)

    def __delitem__(self, index: SupportsIndex | slice, /) -> None:
        self.version += 1
        super().__delitem__(index)

    def __iadd__(self, items: Iterable[T], /) -> WatchedList[T]:
        self.extend(items)
        return self

    def __imul__(self, times: SupportsIndex, /) -> WatchedList[T]:
        self.version += 1
        super().__imul__(times)
        return self
