"""Work on a disk or a store that may never end, and ranks that may never come."""

import contextvars
import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from composer_checkpoint.errors import StorageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["PATIENCE", "in_thread", "meet_within", "work_within"]

A = TypeVar("A")

PATIENCE = 3
"""How many times as long as one rank may work the others wait for it: it may come late, and rank 0 works after it."""

_SOON_S = 5.0  # the store's answer

# How often the ranks of a group have met. All of them count alike, since they meet in the same order.
_meetings: "defaultdict[str, int]" = defaultdict(int)


def work_within(work: Callable[[], A], timeout_s: float, rank: int) -> A:
    """Return what a function returns, or raise if it takes longer.

    What hangs goes on in its thread, which ends with the process: a write that the system does not answer cannot be
    taken back.

    Args:
        work: The function.
        timeout_s: How long it may take.
        rank: This process's, for the error.

    Raises:
        StorageError: If it takes longer.
    """

    def overdue() -> str:
        return (
            f"rank {rank} (on {socket.gethostname()}) has not done its part of the checkpoint within "
            f"save_timeout_in_seconds={timeout_s!r}: its disk or store hangs, or is too slow. The checkpoint before is "
            f"untouched. Look after the disk, or allow for more time."
        )

    return in_thread(work, timeout_s, overdue)


def meet_within(talk: Callable[[], A], group: "ProcessGroup", timeout_s: float, rank: int) -> A:
    """Return what the ranks of a group tell each other, or raise on all that are here if others do not come.

    A dead rank is noticed by the collective, at once. Of those that only hang nothing is heard, so each rank leaves a
    note at the group's store when it comes. The store may hang as well, since some process keeps it, and is not waited
    for any longer. Every rank must call this.

    Args:
        talk: The collective.
        group: Who takes part.
        timeout_s: How long it may take.
        rank: This process's.

    Raises:
        StorageError: If a rank does not come in time, with the numbers of those that have not.
    """
    store = group.get_group_store()
    number = _meetings[group.group_name] = _meetings[group.group_name] + 1
    name = f"composer-save-{number}"

    def come() -> A:
        store.set(f"{name}-{rank}", "here")
        if store.check([f"{name}-over"]):
            raise StorageError(
                f"rank {rank} came to save a checkpoint when others had waited for it for {timeout_s!r} s, and given "
                f"up. Look into the log for what held it up."
            )
        reply = talk()
        with suppress(RuntimeError):  # all have come, and who keeps the store may be gone already
            store.delete_key(f"{name}-{rank}")
        return reply

    return in_thread(come, timeout_s, lambda: _who_is_missing(store, name, timeout_s, group.size()))


def in_thread(work: Callable[[], A], timeout_s: float, overdue: Callable[[], str]) -> A:
    """Return what a function returns, or raise a `StorageError` with the text of `overdue` if it takes longer."""
    outcome: Future[A] = Future()
    context = contextvars.copy_context()
    # The thread's copies from a device must come after what was computed here, in whichever stream.
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
            raise  # the work's own
        raise StorageError(overdue()) from error


def _who_is_missing(store: Any, name: str, timeout_s: float, world_size: int) -> str:
    def ask() -> list[int]:
        missing = [other for other in range(world_size) if not store.check([f"{name}-{other}"])]
        store.set(f"{name}-over", "")
        return missing

    silence = f"the ranks have not met within {timeout_s!r} s to save a checkpoint, and their store is silent"
    try:
        missing = in_thread(ask, _SOON_S, lambda: f"{silence}: no answer in {_SOON_S} s")
    except StorageError as error:  # who keeps the store hangs
        return f"{error}. Look after the process that keeps it: rank 0, or the launcher of its node."
    except RuntimeError as error:  # it is gone
        return f"{silence}: {error}"
    return (
        f"ranks {missing} of {world_size} have not come to save a checkpoint, while others waited for {timeout_s!r} s, "
        f"{PATIENCE} times save_timeout_in_seconds: they hang. The checkpoint before is untouched. Look at their logs."
    )
