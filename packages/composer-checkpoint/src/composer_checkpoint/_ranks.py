"""Collective steps that succeed or fail on all ranks alike."""

import contextvars
import pickle
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as tdist
from torch.distributed import ProcessGroup

from composer_checkpoint.errors import CheckpointError, NoCheckpointError, StorageError
from composer_dist import dist
from composer_dist.collectives import cpu_group, is_initialized
from composer_dist.env import get_world_size

A = TypeVar("A")

_PATIENCE = 3  # times the timeout of one rank: others may start late, and rank 0 works after them
_SOON_S = 5.0  # for an answer of the store

# Number of meetings of each group, which makes their keys unique. All ranks count alike: they meet in the same order.
_meetings: "defaultdict[str, int]" = defaultdict(int)


def in_thread(work: Callable[[], A], timeout_s: float, overdue: Callable[[], str]) -> A:
    """Return the result of a function, or raise a `StorageError` with the text of `overdue` if it takes too long."""
    outcome: Future[A] = Future()
    # Context variables, such as the folders of `fetch_once_per_node`, must have their values in the thread as well.
    context = contextvars.copy_context()
    # Device copies made in the thread must come after the work that was queued here, so it uses the same stream.
    stream = torch.cuda.stream(torch.cuda.current_stream()) if torch.cuda.is_initialized() else nullcontext()

    def run() -> None:
        try:
            with stream:
                outcome.set_result(context.run(work))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="save", daemon=True).start()
    try:
        return outcome.result(timeout_s)
    except TimeoutError as error:
        if outcome.done():
            raise  # raised by the work itself
        raise StorageError(overdue()) from error


def _who_is_missing(store: Any, name: str, timeout_s: float, world_size: int) -> str:
    def ask() -> list[int]:
        missing = [other for other in range(world_size) if not store.check([f"{name}-{other}"])]
        store.set(f"{name}-over", "")
        return missing

    silence = f"the ranks have not met within {timeout_s!r} s to save a checkpoint, and their store is silent"
    try:
        missing = in_thread(ask, _SOON_S, lambda: f"{silence}: no answer in {_SOON_S} s")
    except StorageError as error:  # the process of the store hangs
        return f"{error}. Check the process that hosts it: rank 0, or the launcher of its node."
    except RuntimeError as error:  # the process of the store is gone
        return f"{silence}: {error}"
    return (
        f"ranks {missing} of {world_size} have not come to save a checkpoint, while others waited for {timeout_s!r} s, "
        f"{_PATIENCE} times save_timeout_in_seconds: they hang. The previous checkpoint is unchanged. Check their logs."
    )


B = TypeVar("B")


class Ranks:
    """Ranks of a group, or a single process.

    Args:
        group: The ranks that take part; all ranks when `None`. Messages go through the CPU: through a companion gloo
            group if the group has no CPU backend.
        timeout_s: Time limit in seconds for the work of each rank. The others wait for a rank for three times as long.
            `None` sets no limit on the work, and collectives have the group's own timeout.

    Raises:
        RuntimeError: If several processes were started without a process group.
        ValueError: If this rank is not in the group.
    """

    def __init__(self, group: ProcessGroup | None = None, *, timeout_s: float | None = None) -> None:
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
        """Call `work` on each rank, `combine` on rank 0 with all results, and return this rank's item of its list.

        Every rank must call this. The error of the first rank that failed is raised on every rank. If a rank does not
        arrive in time, a `StorageError` is raised on those that did.
        """
        if self.world_size == 1:
            return self._within_time(lambda: combine([work()]))[0]
        mine = _attempt(lambda: self._within_time(work), self.rank)

        def talk() -> Any:
            gathered: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
            tdist.gather_object(mine, gathered, group=self._group, group_dst=0)
            replies: list[Any] | None = None
            if gathered is not None:
                failure = next((outcome for outcome in gathered if isinstance(outcome, _Failure)), None)
                done = failure or _attempt(lambda: self._within_time(lambda: list(combine(gathered))), self.rank)
                # Every rank raises the same error.
                replies = [done] * self.world_size if isinstance(done, _Failure) else done
            reply: list[Any] = [None]
            tdist.scatter_object_list(reply, replies, group=self._group, group_src=0)
            return reply[0]

        reply = self._meet(talk)
        if not isinstance(reply, _Failure):
            return reply
        if isinstance(mine, _Failure) and mine.rank == reply.rank:
            raise mine.error  # the original, with its traceback and cause
        reply.error.add_note(f"(raised on rank {reply.rank})")
        raise reply.error

    def together(self, work: Callable[[], A]) -> A:
        """Call `work` on each rank, and return this rank's result when all are done. Every rank must call this."""
        done: list[A] = []
        self.exchange(lambda: done.append(work()), lambda nothing: nothing)
        return done[0]

    def from_first(self, work: Callable[[], A]) -> A:
        """Call `work` on rank 0, and return its result, or raise its error, on all ranks. Every rank must call this."""
        # The cast holds on rank 0, whose result is the one that is used.
        mine = cast("Callable[[], A]", work if self.rank == 0 else lambda: None)
        return self.exchange(mine, lambda results: results[:1] * len(results))

    def own_result_of_first(self, work: Callable[[], A]) -> A | None:
        """Call `work` on rank 0, and return its result there and `None` elsewhere, once it is done on all ranks."""
        return self.together(work if self.rank == 0 else lambda: None)

    def all(self, statement: bool) -> bool:
        """Return whether `statement` is true on every rank. Every rank must call this."""
        return bool(self.least(int(statement)))

    def least(self, number: int) -> int:
        """Return the smallest `number` of all ranks. Every rank must call this."""
        if self.world_size == 1:
            return number
        numbers = torch.tensor([number])
        tdist.all_reduce(numbers, op=tdist.ReduceOp.MIN, group=self._group)
        return int(numbers.item())

    def _meet(self, talk: Callable[[], A]) -> A:
        """Return the result of a collective, or raise on the ranks that arrived if others do not.

        A dead rank makes the collective fail at once. A rank that hangs does not, so each rank sets a key in the
        group's store when it arrives. The store's process may hang too, so the wait for it is short.
        """
        if self._timeout_s is None:
            return talk()
        group, rank, timeout_s = self._group or tdist.group.WORLD, self.rank, _PATIENCE * self._timeout_s
        assert group is not None  # since there are several ranks
        store = group.get_group_store()
        number = _meetings[group.group_name] = _meetings[group.group_name] + 1
        name = f"composer-save-{number}"

        def come() -> A:
            store.set(f"{name}-{rank}", "here")
            # A late rank must not start a collective that the others have abandoned.
            if store.check([f"{name}-over"]):
                raise StorageError(
                    f"rank {rank} came to save a checkpoint when others had waited for it for {timeout_s!r} s, and had "
                    f"stopped waiting. Look for the reason of the delay in the log."
                )
            reply = talk()
            with suppress(RuntimeError):  # all have arrived, and the process of the store may have exited
                store.delete_key(f"{name}-{rank}")
            return reply

        return in_thread(come, timeout_s, lambda: _who_is_missing(store, name, timeout_s, self.world_size))

    def _within_time(self, work: Callable[[], A]) -> A:
        # A call that hangs stays in its daemon thread until the process ends: a blocked write cannot be canceled.
        return work() if self._timeout_s is None else in_thread(work, self._timeout_s, self._overdue)

    def _overdue(self) -> str:
        return (
            f"rank {self.rank} (on {socket.gethostname()}) has not done its part of the checkpoint within "
            f"save_timeout_in_seconds={self._timeout_s!r}: its disk or store hangs, or is too slow. The previous "
            f"checkpoint is unchanged. Check the disk, or raise the timeout."
        )


@dataclass(frozen=True, slots=True)
class _Failure:
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
    """Return the error itself if it survives pickling, else a `CheckpointError` with its text."""
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    except Exception:  # the constructor of a foreign class may raise anything
        pass
    return CheckpointError(f"{type(error).__name__}: {error}")


def fetch_together(fetch: Callable[[], None]) -> None:
    """Call `fetch`, and raise on all ranks if it failed on any. Every rank must call this."""
    mine: Exception | None = None
    try:
        fetch()
    except Exception as error:  # raised only after the gather, in which the other ranks wait
        mine = error
    failures = dist.all_gather_object(
        None if mine is None else (isinstance(mine, FileNotFoundError), f"{type(mine).__name__}: {mine}")
    )
    if mine is not None:
        raise mine
    for rank, failure in enumerate(failures):
        if failure is not None:
            is_missing, text = failure
            kind = NoCheckpointError if is_missing else CheckpointError
            raise kind(not_here("the checkpoint", rank, text))


def of_first_rank_of_node(folder: str) -> str:
    """Return the path that the first rank of this node has for a folder. Every rank must call this."""
    folders = dist.all_gather_object((dist.get_node_rank(), dist.get_local_rank(), folder))
    return next(shared for node, local, shared in folders if node == dist.get_node_rank() and local == 0)


def not_here(what: str, rank: int, reason: str) -> str:
    """Return the error message for a file that another rank should have downloaded."""
    return (
        f"No such file or directory: {what}. This likely implies a download failed on local rank 0, which is global "
        f"rank {rank} ({reason}). Look at the log of that rank."
    )
