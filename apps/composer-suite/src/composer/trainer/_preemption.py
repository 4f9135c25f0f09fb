"""What `fit` does when this process is asked to end: it saves a checkpoint after the current batch, and leaves."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from composer.trainer._stop_agreement import StopAgreement
from composer.trainer._termination import TERMINATION_SIGNALS, end_run, is_free_signal
from composer_dist import get_global_rank, get_world_size

if TYPE_CHECKING:
    from composer_checkpoint.saver import CheckpointSaver
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["Preemption"]

_SIGNALS = [*TERMINATION_SIGNALS, signal.SIGINT]
# Handlers that would end the process before the batch has.
_NOT_CALLED = (signal.default_int_handler, end_run)

# The name that `python_log_level` of a Trainer reaches.
_log = logging.getLogger("composer.trainer.trainer")


class Preemption:
    """Ends a training for a signal, on all ranks after the same batch, whichever of them received it.

    SIGTERM and SIGUSR1 end in exit status 143, SIGINT in 130. A second SIGINT is a `KeyboardInterrupt` at once.
    """

    def __init__(self, state: State, logger: Logger, saver: CheckpointSaver | None) -> None:
        self._state = state
        self._logger = logger
        self._saver = saver
        self._received: int | None = None
        self._previous: dict[int, Any] = {}
        self._agreement: StopAgreement | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Take the signals of this process, if it is the main thread that trains; handlers of before come back.

        Every rank must enter this.

        Raises:
            SystemExit: Where training came to its end while the ranks were asked to stop.
        """
        self._received = None
        self._agreement = StopAgreement(lambda: self._received) if get_world_size() > 1 else None
        self._handle()
        has_failed = True
        try:
            if self._agreement is not None:
                self._agreement.begin()
            yield
            has_failed = False
        except SystemExit:
            has_failed = not self._is_agreed()
            raise
        finally:
            if self._agreement is not None:
                self._agreement.end(has_failed=has_failed)
            self._restore()
        if self._received is not None or self._is_agreed():
            raise self._exit()

    def leave_if_asked(self) -> None:
        """Save a checkpoint and leave, if all ranks stop after the batch that has just ended.

        Raises:
            SystemExit: Then.
        """
        if self._agreement is None:
            is_asked = self._received is not None
        else:
            is_asked = self._agreement.stops_here()
        if is_asked:
            self._save()
            raise self._exit()

    def _handle(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python lets no other thread set handlers
        for signum in _SIGNALS:
            previous = signal.getsignal(signum)
            # A signal that is ignored, as under nohup, stays so; a handler that is not Python's could not be put back.
            is_known = previous != signal.SIG_DFL or is_free_signal(signum)
            if previous is not None and previous != signal.SIG_IGN and is_known:
                self._previous[signum] = signal.signal(signum, self._on_signal)

    def _restore(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self._received is not None:
            self._restore()
            raise KeyboardInterrupt
        if self._received is None:
            self._received = signum
        handler = self._previous[signum]
        if callable(handler) and handler not in _NOT_CALLED:
            handler(signum, frame)

    def _is_agreed(self) -> bool:
        return self._agreement is not None and self._agreement.is_agreed

    def _save(self) -> None:
        state, saver = self._state, self._saver
        batch = state.timestamp.num_batches
        if saver is None:
            _log.warning(
                "Training stops after batch %d, as it was asked to by %s. Nothing is saved: give save_folder to go on "
                "from here next time.",
                batch,
                self._name(),
            )
            return
        saver.wait(state, self._logger)
        if saver.last_checkpoint_batch != state.timestamp.batch:
            saver.save(state, self._logger)
        saver.wait(state, self._logger)
        if get_global_rank() == 0:
            _log.warning("Training stops after batch %d, as it was asked to by %s. It is saved.", batch, self._name())

    def _exit(self) -> SystemExit:
        return SystemExit(128 + (signal.SIGINT if self._signal() == signal.SIGINT else signal.SIGTERM))

    def _name(self) -> str:
        return signal.Signals(self._signal()).name

    def _signal(self) -> int:
        """Return the signal that ends the training: of all ranks' signals the first."""
        agreed = None if self._agreement is None else self._agreement.request
        signum = self._received if agreed is None else agreed
        assert signum is not None
        return signum
