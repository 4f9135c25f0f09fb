"""What a signal does to a process while it has a Trainer that does not train: the process ends, and closes before.

Python's own answer to SIGTERM leaves no time for what loggers have yet to send. During `fit`, `Preemption` has the
signals.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from types import FrameType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from composer_events.engine import Engine

__all__ = ["SIGNALS", "close", "end", "take_signals"]

# SIGUSR1 is what schedulers such as Slurm can send some time before their SIGTERM. Windows does not have it.
SIGNALS: Final = [signal.SIGTERM] + ([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])


class _Process:
    """What this process has yet to close.

    Attributes:
        pid: Its id, which a process that it forks does not have.
        engines: Those whose callbacks are to be closed; nothing here keeps one alive.
        num_closing: How many of them are being closed.
        is_asked: Whether a signal came meanwhile.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self.num_closing = 0
        self.is_asked = False


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
    weakref.finalize(engine, _give_back).atexit = False
    for signum in SIGNALS:
        if signal.getsignal(signum) == signal.SIG_DFL:
            signal.signal(signum, end)


def close(engine: Engine) -> None:
    """Close the callbacks of an engine. What asks the process to end meanwhile has to wait until all had their turn.

    Args:
        engine: That of `take_signals`.

    Raises:
        SystemExit: When they are closed, if a signal came.
    """
    _process.num_closing += 1
    try:
        engine.close()
    finally:
        _process.num_closing -= 1
        _process.engines.discard(engine)
        _give_back()
    if _process.is_asked and not _process.num_closing:
        _process.is_asked = False
        raise SystemExit(128 + signal.SIGTERM)


def end(signum: int, frame: FrameType | None) -> None:
    """Leave the process for a signal, in the way that lets everything close.

    Raises:
        SystemExit: Unless something is being closed, which comes first.
    """
    if _process.pid != os.getpid() or not _has_open():
        signal.signal(signum, signal.SIG_DFL)  # a forked process, or nothing to close: as if this were not here
        os.kill(os.getpid(), signum)
    elif _process.num_closing:
        _process.is_asked = True
    elif threading.main_thread().is_alive():  # not so once the interpreter ends and closes what is left
        raise SystemExit(128 + signal.SIGTERM)


def _give_back() -> None:
    """Let signals do again what they do by default, where nothing is left to close."""
    if _has_open() or threading.current_thread() is not threading.main_thread():
        return
    for signum in SIGNALS:
        if signal.getsignal(signum) is end:
            signal.signal(signum, signal.SIG_DFL)


def _has_open() -> bool:
    # Not by the set's length, which counts one that is just going.
    return bool(list(_process.engines))
