"""Close callbacks exactly once, whether the user, the garbage collector or the interpreter's end asks for it."""

from __future__ import annotations

import atexit
import logging
from typing import TYPE_CHECKING, Any

from composer_events._open_callbacks import release
from composer_events.iter_helpers import ensure_tuple
from composer_events.logger import Logger

if TYPE_CHECKING:
    from composer_events.state import State

# The name by which users filter it, whichever package the engine lives in.
_log = logging.getLogger("composer.core.engine")

_num_at_work = 0  # closers of this process


def is_closing() -> bool:
    """Answer whether callbacks of any engine are being closed at this moment, in whichever thread."""
    return _num_at_work > 0


class Closer:
    """Close the callbacks of one engine.

    The interpreter's exit holds this object, so it knows the state and the logger but not the engine: an engine that
    nobody uses any more can go, and closes as it goes.
    """

    def __init__(self, state: State, logger: Logger) -> None:
        self._state, self._logger = state, logger
        self.is_closed = False
        atexit.register(self.close)

    def is_done(self) -> bool:
        """Return whether the state has been trained to its end, and no event is running."""
        elapsed = getattr(self._state, "get_elapsed_duration", lambda: None)()
        return elapsed is not None and float(elapsed) >= 1 and self._state.num_running_events == 0

    def stand_down(self) -> None:
        """Count as closed from now on, and close nothing."""
        self.is_closed = True
        atexit.unregister(self.close)

    def close(self) -> None:
        """Call every callback's `close`, then `post_close` of those that closed well.

        Errors are only logged. A `KeyboardInterrupt` or a `SystemExit` is raised once everybody has had a turn.
        """
        if self.is_closed:
            return
        global _num_at_work
        _num_at_work += 1
        try:
            self._close()
        finally:
            _num_at_work -= 1

    def _close(self) -> None:
        self.stand_down()
        _log.debug("Closing the engine.")
        interrupts: list[BaseException] = []
        closed: list[Any] = []
        for callback in tuple(self._state.callbacks):
            name = type(callback).__name__
            _log.debug("Closing callback %s", name)
            _flush(self._logger, interrupts)
            try:
                callback.close(self._state, self._logger)
            except Exception:
                _log.exception("Error running %s.close(). Its post_close() is skipped.", name)
            except BaseException as interrupt:
                interrupts.append(interrupt)
            else:
                closed.append(callback)
        for callback in closed:
            name = type(callback).__name__
            _flush(self._logger, interrupts)
            _log.debug("Post-closing callback %s", name)
            try:
                callback.post_close()
            except Exception:
                _log.exception("Error running %s.post_close().", name)
            except BaseException as interrupt:
                interrupts.append(interrupt)
            else:
                release(callback)
        _flush(self._logger, interrupts)
        _shut_down_workers(self._state)
        _log.debug("Engine closed.")
        if interrupts:
            raise interrupts[0]


def _flush(logger: object, interrupts: list[BaseException]) -> None:
    """Hand over what was logged, also while a callback was closed: a destination that is closed asks no more."""
    if not isinstance(logger, Logger):  # only our own keeps anything
        return
    try:
        logger.flush()
    except Exception:
        _log.exception("Error handing over metrics while closing.")
    except BaseException as interrupt:
        interrupts.append(interrupt)


def _shut_down_workers(state: State) -> None:
    """End the dataloaders' persistent worker processes, which would otherwise outlive the training."""
    holders: list[Any] = [getattr(state, "train_dataloader", None), getattr(state, "dataloader", None)]
    holders += ensure_tuple(getattr(state, "evaluators", None))
    for loader in map(_innermost, holders):
        if not getattr(loader, "persistent_workers", False) or getattr(loader, "_iterator", None) is None:
            continue
        # torch has no public way to end them. Without its iterator the dataloader starts new ones when asked again.
        try:
            loader._iterator._shutdown_workers()
            loader._iterator = None
        except Exception as error:
            _log.debug("The workers of %s were left to end by themselves: %r", type(loader).__name__, error)


def _innermost(holder: Any) -> Any:
    """Take a dataloader out of the `DataSpec` and the `Evaluator` around it."""
    for _ in range(2):  # counted, since an object that answers every name, such as a mock, goes on for ever
        holder = getattr(holder, "dataloader", holder)
    return holder
