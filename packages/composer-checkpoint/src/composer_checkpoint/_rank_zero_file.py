"""A file that rank 0 writes while the other ranks wait."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from composer_checkpoint._leftovers import discard
from composer_checkpoint._unfinished_names import name_beside
from composer_checkpoint.commit import put_in_place, write_beside
from composer_checkpoint.sharded._ranks import Ranks

__all__ = ["write_on_rank_zero"]

T = TypeVar("T")


def write_on_rank_zero(
    path: str | os.PathLike[str], write: Callable[[Path], object], ranks: Ranks, *, overwrite: bool = True
) -> None:
    """Let rank 0 write a file, whole or not at all; when this returns it is there. Every rank must call this.

    Args:
        path: The file.
        write: Called on rank 0, with the temporary path to write to.
        ranks: Who takes part.
        overwrite: Whether something that has this name may be replaced.

    Raises:
        CheckpointError: On all ranks, if rank 0 cannot write, or takes too long. What was there before is untouched.
    """
    final = Path(os.path.abspath(path))
    temporary = name_beside(final)

    def begin() -> None:
        if ranks.rank == 0:
            write_beside(temporary, final, write, overwrite=overwrite)

    def commit(done: list[T]) -> list[T]:
        put_in_place(temporary, final, overwrite=overwrite)
        return done

    with ExitStack() as undo:
        if ranks.rank == 0:
            undo.callback(discard, temporary)
        # Apart, so that a write that was given up never becomes a checkpoint.
        ranks.exchange(begin, commit)
