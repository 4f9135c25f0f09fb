"""What the launcher does with the signals that it gets: it follows the first, and hurries for Ctrl-C.

torch's handlers turn every signal into an exception, wherever the launcher is just then. While it waits for ranks
that save a last checkpoint that would be wrong: a second SIGHUP, or a scheduler's SIGTERM after its SIGUSR1, asks for
what is being done already.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

__all__ = ["Signals"]

_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


class Signals:
    """The signals of one launch.

    Args:
        names: Those to handle, separated by commas.
    """

    def __init__(self, names: str) -> None:
        self.followed: signal.Signals | None = None
        """The signal for which the ranks were asked to end."""
        self._handlers = _handlers(names)
        self._received: signal.Signals | None = None
        self._is_ending = False
        self._is_interruptible = False
        self._must_hurry = False

    @contextmanager
    def while_starting(self) -> Iterator[None]:
        """Have torch, which sets its handlers whenever it starts processes, do so for these signals."""
        before = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = ",".join(signum.name for signum in self._handlers)
        try:
            yield
        finally:
            if before is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = before
        self._handle()

    @contextmanager
    def while_ending(self, followed: signal.Signals | None) -> Iterator[None]:
        """Keep signals from breaking off what ends the ranks.

        Args:
            followed: The signal for which they end, if that is why.
        """
        self._is_ending = True
        self._handle()
        self.followed = followed
        self._received = followed or self._received
        try:
            yield
        finally:
            self._is_ending = False

    @contextmanager
    def while_interruptible(self) -> Iterator[None]:
        """Let SIGINT, also one that came a moment too early, raise `SignalException`."""
        self._is_interruptible = True
        try:
            if self._must_hurry:
                _raise(signal.SIGINT)
            yield
        finally:
            self._is_interruptible = False

    def catch_up(self) -> None:
        """Raise for a signal that came while ranks ended for another reason."""
        if self.followed is None and self._received is not None:
            _raise(self._received)

    def ignore(self) -> None:
        """Ignore them from now on."""
        for signum in self._handlers:
            signal.signal(signum, signal.SIG_IGN)

    def restore(self) -> None:
        """Handle them as before the launch."""
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def _handle(self) -> None:
        for signum in self._handlers:
            signal.signal(signum, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        signum = signal.Signals(number)
        if self._is_ending or self._received is not None:
            self._received = self._received or signum
            self._must_hurry |= signum == signal.SIGINT
            if self._is_interruptible and self._must_hurry:
                _raise(signum)
            return
        self._received = signum
        _raise(signum)


def _raise(signum: signal.Signals) -> None:
    raise SignalException(f"process {os.getpid()} got {signum.name}", signum)


def _handlers(names: str) -> dict[signal.Signals, Any]:
    """Return the handlers of now of those signals that this process is to handle.

    What it was started to ignore, as nohup and shells do for processes in the background, it goes on to ignore.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}  # Python lets no other thread set handlers
    handlers = {signal.Signals[name.strip()]: signal.SIG_DFL for name in names.split(",")}
    handlers = {signum: signal.getsignal(signum) or default for signum, default in handlers.items()}
    return {signum: handler for signum, handler in handlers.items() if handler != signal.SIG_IGN}
