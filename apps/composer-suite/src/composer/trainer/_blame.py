"""Say in an exception where in training it came from, so that the report of a run with many ranks can name it."""

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from composer_dist import get_global_rank, get_world_size
from composer_events.state import State

TResult = TypeVar("TResult")


class _HasState(Protocol):
    _state: State


def in_stage(stage: str) -> Callable[[Callable[..., TResult]], Callable[..., TResult]]:
    """Make a method add a note to what it raises: the stage, the batch and the rank.

    Args:
        stage: What the method does, such as `'the forward pass'`.
    """

    def decorate(method: Callable[..., TResult]) -> Callable[..., TResult]:
        @functools.wraps(method)
        def noting(self: _HasState, *args: Any, **kwargs: Any) -> TResult:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                _add_note(error, stage, self._state)
                raise

        return noting

    return decorate


def _add_note(error: Exception, stage: str, state: State) -> None:
    if any(note.startswith("raised ") for note in getattr(error, "__notes__", ())):
        return  # a hook, or a stage inside of this one, has said so more precisely
    stamp = state.timestamp
    rank = f" on rank {get_global_rank()}" if get_world_size() > 1 else ""
    error.add_note(f"raised in {stage} of epoch {int(stamp.epoch)}, batch {int(stamp.batch)}{rank}")
