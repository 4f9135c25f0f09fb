"""Steps that ranks take together, and that fail on all of them alike."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as tdist

from composer_checkpoint._bounded import PATIENCE, meet_within, work_within
from composer_checkpoint.errors import CheckpointError
from composer_dist.collectives import cpu_group, is_initialized
from composer_dist.env import get_world_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Ranks"]

A = TypeVar("A")
B = TypeVar("B")


class Ranks:
    """The ranks of a group, or this process alone.

    Args:
        group: Who takes part. All ranks when `None`. Messages go through the CPU: through a gloo companion where the
            group has no backend for that.
        timeout_s: How long each rank may work; who does not come is given up after three times that. `None` for the
            group's own patience, and any length of work.

    Raises:
        RuntimeError: If several processes were started and there is no process group.
        ValueError: If this rank is not in the group.
    """

    def __init__(self, group: "ProcessGroup | None" = None, *, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        if not is_initialized():
            if get_world_size() > 1:
                raise RuntimeError(
                    f"the world size is {get_world_size()}, but there is no process group, so every process would "
                    "write the same checkpoint. Call initialize_dist() first, or unset WORLD_SIZE."
                )
            self.rank, self.world_size, self._group = 0, 1, None
            return
        self.rank, self.world_size = tdist.get_rank(group), tdist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this rank is not in process_group. Call this on the ranks of the group only.")
        self._group = group if self.world_size == 1 else cpu_group(group)

    def exchange(self, work: Callable[[], A], combine: Callable[[list[A]], Sequence[B]]) -> B:
        """Work on each rank, combine what they got on rank 0, and return this rank's part. Every rank must call this.

        Raises:
            Exception: What the first of the failing ranks raised, on every rank.
            StorageError: If a rank is given up, with its number, on every rank that came.
        """
        if self.world_size == 1:
            return self._within_time(lambda: combine([work()]))[0]
        mine = _attempt(lambda: self._within_time(work), self.rank)

        def talk() -> Any:
            gathered: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
            tdist.gather_object(mine, gathered, group=self._group, group_dst=0)
            replies = None if gathered is None else self._combine(gathered, combine)
            reply: list[Any] = [None]
            tdist.scatter_object_list(reply, replies, group=self._group, group_src=0)
            return reply[0]

        reply = self._meet(talk)
        if isinstance(reply, _Failure):
            raise self._as_raised(reply, mine)
        return reply

    def together(self, work: Callable[[], object]) -> None:
        """Work on each rank, and go on when all of them are done. Every rank must call this.

        Raises:
            Exception: What the first of the failing ranks raised, on every rank.
        """
        self.exchange(lambda: (work(), None)[1], lambda done: done)

    def all(self, statement: bool) -> bool:
        """Return whether this is true on every rank. Every rank must call this."""
        return bool(self.least(int(statement)))

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers. Every rank must call this."""
        if self.world_size == 1:
            return number
        numbers = torch.tensor([number])
        tdist.all_reduce(numbers, op=tdist.ReduceOp.MIN, group=self._group)
        return int(numbers.item())

    def _meet(self, talk: Callable[[], Any]) -> Any:
        if self._timeout_s is None:
            return talk()
        group = self._group or tdist.group.WORLD
        assert group is not None  # there are several ranks
        return meet_within(talk, group, PATIENCE * self._timeout_s, self.rank)

    def _within_time(self, work: Callable[[], A]) -> A:
        return work() if self._timeout_s is None else work_within(work, self._timeout_s, self.rank)

    def _combine(self, gathered: list[Any], combine: Callable[[list[Any]], Sequence[object]]) -> list[object]:
        failures: list[object] = [outcome for outcome in gathered if isinstance(outcome, _Failure)]
        if not failures:
            outcome = _attempt(lambda: self._within_time(lambda: list(combine(gathered))), self.rank)
            if not isinstance(outcome, _Failure):
                return outcome
            failures = [outcome]
        return failures[:1] * self.world_size

    def _as_raised(self, failure: "_Failure", mine: object) -> Exception:
        if isinstance(mine, _Failure) and mine.rank == failure.rank:
            return mine.error  # with its traceback and its cause
        failure.error.add_note(f"(raised on rank {failure.rank})")
        return failure.error


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a rank raised."""

    rank: int
    error: Exception

    def __reduce__(self) -> tuple[Any, ...]:
        return _Failure, (self.rank, _portable(self.error))


def _attempt(work: Callable[[], A], rank: int) -> "A | _Failure":
    try:
        return work()
    except Exception as error:
        return _Failure(rank, error)


def _portable(error: Exception) -> Exception:
    """Return the error itself if it survives the journey to another rank, else its text."""
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    except Exception:  # whatever a foreign class's constructor objects to
        pass
    return CheckpointError(f"{type(error).__name__}: {error}")
