"""What a state must have for an event to make sense."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from composer_events.event import Event

if TYPE_CHECKING:
    from composer_events.state import State

_LOADING: Final = (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD)
_STANDALONE: Final = (Event.EVAL_STANDALONE_START, Event.EVAL_STANDALONE_END)

_WITHOUT_DATALOADER: Final = frozenset((*_LOADING, *_STANDALONE))
_WITHOUT_DURATION: Final = frozenset((*_LOADING, *(event for event in Event if event.is_eval or event.is_predict)))


def check_requirements(event: Event, state: State) -> None:
    """Refuse an event that the state is not ready for.

    Raises:
        AssertionError: If the dataloader or the duration is missing.
    """
    if state.dataloader is None and event not in _WITHOUT_DATALOADER:
        raise AssertionError(
            f"{event} fires while a dataloader is in use, but state.dataloader is None. Set one first, as with "
            f"`state.set_dataloader(dataloader, 'train')`."
        )
    if state.max_duration is None and event not in _WITHOUT_DURATION:
        raise AssertionError(
            f"{event} fires while training has an end, but state.max_duration is None. Set one first, such as "
            f"`state.max_duration = '10ep'`."
        )
