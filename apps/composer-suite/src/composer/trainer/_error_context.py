"""Notes on exceptions: the stage of training, and the failure of the rank that failed first."""

import itertools
import traceback
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Final, TypeVar

from composer.trainer._rank_sync import open_store
from composer_dist import get_global_rank, get_world_size
from composer_events.engine import listening
from composer_events.event import Event
from composer_events.state import State

TFunction = TypeVar("TFunction", bound=FunctionType)

# By code object, which tracebacks contain: a wrapper around each function would slow down every call.
_STAGES: dict[CodeType, str] = {}


def stage(name: str) -> Callable[[TFunction], TFunction]:
    """Decorate a function that implements a stage of training, such as `'the forward pass'`, for `name_stage`."""

    def register(function: TFunction) -> TFunction:
        _STAGES[function.__code__] = name
        return function

    return register


def name_stage(error: BaseException, state: State) -> None:
    """Add a note to an exception, with its innermost stage, the batch and the rank.

    No note is added if a hook has added a more precise one, or if the traceback has no stage. If only the traceback of
    the cause has one, the note is added to the cause.
    """
    for each in (error, error.__cause__):
        if not isinstance(each, Exception) or any(
            note.startswith("raised ") for note in getattr(each, "__notes__", ())
        ):
            return
        codes = (frame.f_code for frame, _ in traceback.walk_tb(each.__traceback__))
        stages = [_STAGES[code] for code in codes if code in _STAGES]
        if stages:
            stamp = state.timestamp
            rank = f" on rank {get_global_rank()}" if get_world_size() > 1 else ""
            each.add_note(f"raised in {stages[-1]} of epoch {stamp.num_epochs}, batch {stamp.num_batches}{rank}")
            if "find_unused_parameters=True" in str(each):  # PyTorch's advice, for which the Trainer has no argument
                each.add_note(
                    "Some layers of the model take no part in the loss. Train without them, or give the Trainer "
                    "ddp_sync_strategy='forced_sync', which needs no gradient of theirs."
                )
            return


def name_setters(error: Exception, state: State, events: Iterable[Event]) -> None:
    """Add a note with the algorithms and callbacks that may have set a batch that cannot be split."""
    setters = [f"algorithm {type(algorithm).__name__}" for algorithm in state.algorithms]
    for event in events:
        setters += [f"callback {type(callback).__name__} on {event}" for callback in listening(state.callbacks, event)]
    if setters:
        kind = type(state.batch).__name__
        error.add_note(f"state.batch is a {kind}. If no dataloader yielded it, it was set by {' or '.join(setters)}")


_MOST_KEPT: Final = 20_000  # characters from the end; the store keeps them in memory
_KEY: Final = "first"

_uses: Final = itertools.count()  # per process; all ranks count alike
_use = next(_uses)


def forget_failures() -> None:
    """Forget earlier failures. Every rank must call this, for each fit, evaluation and prediction."""
    global _use
    _use = next(_uses)


def first_failure_of_others(error: BaseException) -> str | None:
    """Publish the failure of this rank, and return the message of the rank that failed first.

    This does not block on other ranks: they may be gone, and the store with them.

    Returns:
        The first rank and its traceback; `None` if this rank is the first, or no rank has published one.
    """
    if get_world_size() == 1:
        return None
    rank = f"Rank {get_global_rank()}"
    told = f"{rank} failed first:\n{''.join(traceback.format_exception(error))[-_MOST_KEPT:]}"
    try:
        store = open_store(f"composer/failure/{_use}")
        # A KeyboardInterrupt or SystemExit is usually a consequence of the failure of another rank, so it only reads.
        if isinstance(error, Exception):
            first = store.compare_set(_KEY, "", told).decode(errors="replace")
        elif store.check([_KEY]):
            first = store.get(_KEY).decode(errors="replace")
        else:
            return None
    except Exception:  # any class, depending on the store; this rank's own error matters more
        return None
    return None if first.startswith(f"{rank} ") else first
