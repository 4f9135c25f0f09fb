"""What a signal does to a process while it has a Trainer that does not train: the process ends, and closes before.

Python's own answer to SIGTERM leaves no time for what loggers have yet to send. During `fit`, `Preemption` has the
signals.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final

from composer_events.engine import is_closing

if TYPE_CHECKING:
    from composer_events.engine import Engine

__all__ = ["TERMINATION_SIGNALS", "close_engine", "end_run", "is_free_signal", "postponed", "take_signals"]

# SIGUSR1 is what schedulers such as Slurm can send some time before their SIGTERM. Windows does not have it.
TERMINATION_SIGNALS: Final = [signal.SIGTERM] + ([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])

_POLL_S: Final = 0.05
_ONE_S: Final = 1.0  # a launcher and a scheduler may both send the same request


class _Process:
    """What this process has yet to close.

    Attributes:
        pid: Its id, which a process that it forks does not have.
        engines: Those whose callbacks are to be closed; nothing here keeps one alive.
        num_busy: How many things are being done that no signal breaks off.
        is_asked: Whether a signal waits for the end of these.
        asked_at_s: When the process was first asked to end while Python was ending.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self.num_busy = 0
        self.is_asked = False
        self.asked_at_s: float | None = None


_process = _Process()


def take_signals(engine: Engine) -> None:
    """Let a signal that would kill this process raise `SystemExit` instead, until the engine is closed or gone.

    A handler of the user's own stays, as it is up to that what the signal means; so does a signal that is ignored.

    Args:
        engine: Of a Trainer. It is closed when the interpreter ends, if not before.
    """
    global _process
    if threading.current_thread() is not threading.main_thread():
        return  # Python lets no other thread set handlers
    if _process.pid != os.getpid():
        _process = _Process()
    _process.engines.add(engine)
    for signum in TERMINATION_SIGNALS:
        if signal.getsignal(signum) == signal.SIG_DFL and is_free_signal(signum):
            signal.signal(signum, end_run)


def close_engine(engine: Engine) -> None:
    """Close the callbacks of an engine, and let signals do again what they did where it was the last.

    Args:
        engine: That of `take_signals`.

    Raises:
        SystemExit: When they are closed, if a signal came meanwhile.
    """
    is_main = threading.current_thread() is threading.main_thread()
    with postponed():
        try:
            engine.close()
        finally:
            _process.engines.discard(engine)
            if is_main and not list(_process.engines):
                _give_back()
        is_asked = is_main and _process.is_asked
        _process.is_asked &= not is_asked
    if is_asked:
        raise SystemExit(128 + signal.SIGTERM)


@contextmanager
def postponed() -> Iterator[None]:
    """Let what asks the process to end wait for the end of the context."""
    _process.num_busy += 1
    try:
        yield
    finally:
        _process.num_busy -= 1


def end_run(signum: int, frame: FrameType | None) -> None:
    """Leave the process for a signal, in the way that lets everything close.

    What is being closed comes first. A process that Python ends already goes on with that, until it is asked again.

    Raises:
        SystemExit: Unless something comes first, or there is nothing to close.
    """
    if _process.pid != os.getpid():  # a forked process ends as if this were not here
        _end_at_once(signum)
    elif not threading.main_thread().is_alive():  # Python waits for threads, and closes what is left
        now_s = time.monotonic()
        if _process.asked_at_s is None:
            _process.asked_at_s = now_s
        elif now_s - _process.asked_at_s > _ONE_S:
            _end_at_once(signum)
    elif _is_busy():
        if not _process.is_asked:
            _process.is_asked = True
            threading.Thread(target=_ask_again, args=(signum,), name="composer-signal", daemon=True).start()
    elif _process.is_asked or list(_process.engines):
        _process.is_asked = False
        raise SystemExit(128 + signal.SIGTERM)
    else:
        _end_at_once(signum)


def is_free_signal(signum: int) -> bool:
    """Answer whether no handler is set of which Python does not know, as those of `faulthandler.register` are.

    Where the system does not tell, there is none.
    """
    try:
        with open("/proc/self/status") as status:
            caught = next((line.split()[1] for line in status if line.startswith("SigCgt:")), "0")
    except OSError:
        return True
    return not int(caught, 16) >> (signum - 1) & 1


def _give_back() -> None:
    for signum in TERMINATION_SIGNALS:
        if signal.getsignal(signum) is end_run:
            signal.signal(signum, signal.SIG_DFL)


def _is_busy() -> bool:
    return _process.num_busy > 0 or is_closing()


def _ask_again(signum: int) -> None:
    """Send a signal again once nothing keeps it waiting, unless `close_engine` raised, which `__del__` would lose."""
    time.sleep(_POLL_S)
    while _is_busy():
        time.sleep(_POLL_S)
    if _process.is_asked:
        os.kill(os.getpid(), signum)


def _end_at_once(signum: int) -> None:
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
