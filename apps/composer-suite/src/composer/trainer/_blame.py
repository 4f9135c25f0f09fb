"""Say in an exception where in training it came from, so that the report of a run with many ranks can name it."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from composer_dist import get_global_rank, get_world_size
from composer_events.callback import Callback
from composer_events.event import Event
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


def name_dataset(error: Exception, dataloader: Any) -> None:
    """Add to what a dataloader raised whose dataset it was reading, and what can be done about its workers."""
    dataset = getattr(dataloader, "dataset", None)
    if dataset is None:
        return
    num_workers = getattr(dataloader, "num_workers", 0)
    reader = f"a {type(dataloader).__name__}" + (f" with num_workers={num_workers}" if num_workers else "")
    error.add_note(f"{reader} was reading {type(dataset).__module__}.{type(dataset).__qualname__}")
    said = f"{error} {error.__cause__}"  # the words are PyTorch's, which does not say what to do
    if "killed by signal: Killed" in said:
        error.add_note(
            "A worker that somebody else kills was mostly too large for the machine's memory: have fewer workers, a "
            "smaller prefetch_factor, or more memory."
        )
    elif "DataLoader timed out" in said:
        error.add_note(
            "No worker gave the next batch for that long: one of them hangs, or loading takes longer than the "
            "DataLoader's timeout, which can be raised."
        )


def name_setters(error: Exception, state: State, events: Iterable[Event]) -> None:
    """Add to what was raised for a batch that cannot be cut who may have put it in the place of the dataloader's.

    Args:
        error: What was raised.
        state: Has the batch.
        events: Those since the dataloader gave its own.
    """
    setters = [f"algorithm {type(algorithm).__name__}" for algorithm in state.algorithms]
    for event in events:
        setters += [
            f"callback {type(callback).__name__} on {event}" for callback in state.callbacks if _acts(callback, event)
        ]
    kind = type(state.batch).__name__
    if setters:
        error.add_note(f"state.batch is a {kind}. If no dataloader gave that, it was set by {' or '.join(setters)}")


def _acts(callback: Callback, event: Event) -> bool:
    methods = ("run_event", event.value)
    own = vars(callback)
    return any(name in own or getattr(type(callback), name) is not getattr(Callback, name) for name in methods)


def _add_note(error: Exception, stage: str, state: State) -> None:
    if any(note.startswith("raised ") for note in getattr(error, "__notes__", ())):
        return  # a hook, or a stage inside of this one, has said so more precisely
    stamp = state.timestamp
    rank = f" on rank {get_global_rank()}" if get_world_size() > 1 else ""
    error.add_note(f"raised in {stage} of epoch {int(stamp.epoch)}, batch {int(stamp.batch)}{rank}")
