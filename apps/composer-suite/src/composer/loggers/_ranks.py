"""The first call to a service, about which all ranks learn how it went."""

from collections.abc import Callable
from typing import TypeVar

from composer.loggers._outbox import Outbox
from composer_dist import dist, get_global_rank

__all__ = ["open_on_ranks"]

TResult = TypeVar("TResult")


def open_on_ranks(
    outbox: Outbox, connect: Callable[[], TResult], *raised: type[Exception], is_enabled: bool = True
) -> list[TResult | None]:
    """Open an outbox where it is used, and return what each rank got. Every rank must call this.

    Args:
        outbox: What to open.
        connect: The first call.
        *raised: Errors that are the user's to mend. They are raised on all ranks.
        is_enabled: Whether this rank opens it.

    Returns:
        By rank: what `connect` returned; `None` where it was not called, raised or took too long.
    """
    found, error = None, None
    if is_enabled:
        try:
            found = outbox.open(connect, *raised)
        except raised as caught:
            error = caught
    told = dist.all_gather_object((found, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    for rank, (_, text) in enumerate(told):
        if text is not None:
            raise RuntimeError(
                f"rank {get_global_rank()} stops, since {outbox.service} has failed on rank {rank}: {text}"
            )
    return [result for result, _ in told]
