"""Which callbacks are in use by a run that has not been closed."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final, Protocol

from composer_events._calling import method_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from composer_events.callback import Callback

# By id, because a callback need not be hashable; weakly, because one that is gone is in nobody's use.
_OPEN: Final[weakref.WeakValueDictionary[int, Callback]] = weakref.WeakValueDictionary()


class Holder(Protocol):
    """What closes the callbacks of an engine."""

    def is_done(self) -> bool:
        """Return whether training is over."""
        ...

    def close(self) -> None:
        """Close the callbacks."""
        ...


_HOLDERS: Final[weakref.WeakValueDictionary[int, Holder]] = weakref.WeakValueDictionary()


def claim(callbacks: Sequence[Callback], holder: Holder) -> None:
    """Mark callbacks as in use. One of an engine whose training is over is closed with that engine first.

    Raises:
        TypeError: If one of them is no callback.
        RuntimeError: If one of them is in use already. None is marked then.
    """
    for callback in callbacks:
        method_of("callback", callback, "run_event")
        before = _HOLDERS.get(id(callback))
        if _OPEN.get(id(callback)) is callback and before is not holder and before is not None and before.is_done():
            before.close()
        if _OPEN.get(id(callback)) is callback:
            raise RuntimeError(
                f"Cannot create a new trainer with an open callback or logger from a previous trainer: "
                f"{callback!r} ({type(callback).__name__}) is still in use, and that one has not trained to its end. "
                f"Call `trainer.close()` (or `engine.close()`) on the previous one first, or make a new "
                f"{type(callback).__name__}."
            )
    for callback in callbacks:
        _OPEN[id(callback)] = callback
        _HOLDERS[id(callback)] = holder


def claim_added(callbacks: Sequence[Callback], claimed: Sequence[Callback], holder: Holder) -> tuple[Callback, ...]:
    """Mark those as in use that have come since, and return all there are now.

    Raises:
        RuntimeError: If one of the new ones is in use already. None is marked then.
    """
    claim([callback for callback in callbacks if not any(callback is one for one in claimed)], holder)
    return tuple(callbacks)


def release(callback: Callback) -> None:
    """Mark a callback as free for another run."""
    _OPEN.pop(id(callback), None)
