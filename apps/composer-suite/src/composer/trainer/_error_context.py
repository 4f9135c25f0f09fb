"""Say in an exception where in training it came from, so that the report of a run with many ranks can name it."""

from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, TracebackType
from typing import Any, TypeVar

from composer_dist import get_global_rank, get_world_size
from composer_events.callback import Callback
from composer_events.event import Event
from composer_events.state import State

TFunction = TypeVar("TFunction", bound=FunctionType)

_STAGES: dict[CodeType, str] = {}


def in_stage(stage: str) -> Callable[[TFunction], TFunction]:
    """Let `name_stage` call by its name what a function does. A call costs no more than before.

    Args:
        stage: What the function does, such as `'the forward pass'`.
    """

    def register(function: TFunction) -> TFunction:
        _STAGES[function.__code__] = stage
        return function

    return register


def name_stage(error: BaseException, state: State) -> None:
    """Add to an exception the innermost stage that it came through, the batch and the rank.

    Nothing is added if a hook has said so more precisely, or if it came through no stage. Where only the exception that
    it was raised from did, that one says so.
    """
    for each in (error, error.__cause__):
        has_place = any(note.startswith("raised ") for note in getattr(each, "__notes__", ()))
        if not isinstance(each, Exception) or has_place:
            return
        stages = [_STAGES[code] for code in _codes(each.__traceback__) if code in _STAGES]
        if stages:
            stamp = state.timestamp
            rank = f" on rank {get_global_rank()}" if get_world_size() > 1 else ""
            each.add_note(f"raised in {stages[-1]} of epoch {stamp.num_epochs}, batch {stamp.num_batches}{rank}")
            if "find_unused_parameters=True" in str(each):  # PyTorch's advice, which a Trainer has no argument for
                each.add_note(
                    "Some layers of the model take no part in the loss. Train without them, or give the Trainer "
                    "ddp_sync_strategy='forced_sync', which needs no gradient of theirs."
                )
            return


def _codes(traceback: TracebackType | None) -> Iterator[CodeType]:
    while traceback is not None:
        yield traceback.tb_frame.f_code
        traceback = traceback.tb_next


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
