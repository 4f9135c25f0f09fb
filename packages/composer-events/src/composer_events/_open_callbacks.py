"""Which callbacks are in use by a run that has not been closed."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

from composer_events._calling import method_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from composer_events.callback import Callback

# By id, because a callback need not be hashable; weakly, because one that is gone is in nobody's use.
_OPEN: Final[weakref.WeakValueDictionary[int, Callback]] = weakref.WeakValueDictionary()


def claim(callbacks: Sequence[Callback]) -> None:
    """Mark callbacks as in use.

    Raises:
        TypeError: If one of them is no callback.
        RuntimeError: If one of them is in use already. None is marked then.
    """
    for callback in callbacks:
        method_of("callback", callback, "run_event")
        if _OPEN.get(id(callback)) is callback:
            raise RuntimeError(
                f"Cannot create a new trainer with an open callback or logger from a previous trainer: "
                f"{callback!r} ({type(callback).__name__}) is still in use. Call `trainer.close()` (or "
                f"`engine.close()`) on the previous one first, or make a new {type(callback).__name__}."
            )
    for callback in callbacks:
        _OPEN[id(callback)] = callback


def claim_added(callbacks: Sequence[Callback], claimed: Sequence[Callback]) -> tuple[Callback, ...]:
    """Mark those as in use that have come since, and return all there are now.

    Raises:
        RuntimeError: If one of the new ones is in use already. None is marked then.
    """
    claim([callback for callback in callbacks if not any(callback is one for one in claimed)])
    return tuple(callbacks)


def release(callback: Callback) -> None:
    """Mark a callback as free for another run."""
    _OPEN.pop(id(callback), None)
