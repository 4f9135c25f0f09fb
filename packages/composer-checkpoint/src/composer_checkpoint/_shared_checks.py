"""Checks that rank 0 asks for, one after the other, and that each rank makes of its own file at the same time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from composer_checkpoint.sharded._ranks import Ranks
from composer_dist import dist

__all__ = ["shared_check"]

T = TypeVar("T")


@contextmanager
def shared_check(check: Callable[[str], T]) -> Iterator[Callable[[str], list[T]]]:
    """Give rank 0 a function that asks all ranks to check a path. The others serve it first. Every rank must call this.

    Args:
        check: What each rank does with the path, in its own way.

    Yields:
        On rank 0 the function: it returns what the ranks have found, and raises what the first of those that failed has
        raised. On others, where rank 0 has left the context by then, nobody must call it.
    """
    ranks = Ranks()

    def answer(path: str) -> list[T]:
        return ranks.exchange(lambda: check(path), lambda found: [found] * len(found))

    def ask(path: str) -> list[T]:
        dist.broadcast_object_list([path], src=0)
        return answer(path)

    if ranks.rank == 0:
        try:
            yield ask
        finally:
            dist.broadcast_object_list([None], src=0)
        return
    asked: list[Any] = [None]
    dist.broadcast_object_list(asked, src=0)
    while asked[0] is not None:
        with suppress(Exception):  # rank 0 has it too, and decides what follows
            answer(asked[0])
        dist.broadcast_object_list(asked, src=0)
    yield ask
