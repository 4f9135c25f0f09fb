"""What the rank that failed first has failed of: the others only see that it is gone."""

from __future__ import annotations

import itertools
import traceback
from typing import Final

from composer.trainer._store import open_store
from composer_dist import get_global_rank, get_world_size

__all__ = ["begin_stage", "first_failure_of_others"]

_MOST_KEPT: Final = 20_000  # characters, the last ones: the store has them in memory
_KEY: Final = "first"

_stages: Final = itertools.count()  # of this process; all ranks have as many
_stage = next(_stages)


def begin_stage() -> None:
    """Forget what failed before. Every rank must call this, for each fit, evaluation and prediction."""
    global _stage
    _stage = next(_stages)


def first_failure_of_others(error: BaseException) -> str | None:
    """Tell the other ranks what this one has failed of, and return what one that failed before has told.

    Nobody waits for another rank, which may be gone, and so may the store.

    Args:
        error: What ends this rank's training. A signal is nobody's failure, but a launcher sends one after a failure.

    Returns:
        The rank and its traceback; `None` if this rank is the first, or nothing was told.
    """
    if get_world_size() == 1:
        return None
    rank = f"Rank {get_global_rank()}"
    told = f"{rank} failed first:\n{''.join(traceback.format_exception(error))[-_MOST_KEPT:]}"
    try:
        store = open_store(f"composer/failure/{_stage}")
        if isinstance(error, Exception):
            first = store.compare_set(_KEY, "", told).decode(errors="replace")
        elif store.check([_KEY]):
            first = store.get(_KEY).decode(errors="replace")
        else:
            return None
    except Exception:  # of what kind it is depends on the store; that of this rank is what counts
        return None
    return None if first.startswith(f"{rank} ") else first
