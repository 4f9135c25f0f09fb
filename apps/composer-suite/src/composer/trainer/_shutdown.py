"""Stop of all ranks after the same batch, when any of them receives a signal.

Training uses no collectives for this. Each rank has a thread that polls the store of the process group; the training
loop only counts its batches and reads a flag. The protocol:

1. A request is written into the store, and every thread finds it.
2. Each thread closes a gate in front of its rank's next batch, then publishes the batch that the rank has entered.
   The rank counts a batch before it reads the gate, so it never trains beyond the published one.
3. The latest batch that any rank has entered is the last one for all. The gates open, and each rank stops after it.

Deadlocks cannot occur: a rank at its gate does not keep others from a batch that all have entered, and threads answer
even while their rank is inside a collective.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from tqdm.std import tqdm

from composer.trainer._rank_sync import open_store
from composer_dist import get_global_rank, get_world_size
from composer_events.engine import is_closing

if TYPE_CHECKING:
    from composer_checkpoint.saver import CheckpointSaver
    from composer_events.engine import Engine
    from composer_events.logger import Logger
    from composer_events.state import State


_POLL_S: Final = 0.5  # delay until a request is noticed; each poll is one short message to the store
_ANSWER_POLL_S: Final = 0.02  # the same, after a request
_PATIENCE_S: Final = 60.0  # threads answer within milliseconds; a later answer means a dead process
_NEVER: Final = "never"  # published by a rank that has finished its training
_fits: Final = itertools.count()  # per process; all ranks count alike


class StopAgreement:
    """Agreement of all ranks on a common last batch.

    Attributes:
        request: The first request of any rank, once it is known on this rank.
    """

    def __init__(self, ask: Callable[[], int | None]) -> None:
        self.request: int | None = None
        self._ask = ask
        self._entered = 1  # the current batch, counted from 1
        self._is_closed = False  # the gate
        self._last: int | None = None
        self._is_known = threading.Event()
        self._is_over = threading.Event()
        self._has_failed = False
        self._error: Exception | None = None
        self._key = f"composer/stop/{next(_fits)}"
        self._thread = threading.Thread(target=self._watch, name="composer-stop", daemon=True)

    @property
    def is_agreed(self) -> bool:
        return self._last is not None

    def begin(self) -> None:
        """Start to poll for requests. Every rank must call this before its first batch."""
        self._thread.start()

    def stops_here(self) -> bool:
        """Return, between two batches, whether all ranks stop after the one that has ended."""
        ended = self._entered
        self._entered = ended + 1  # before the gate is read, or the thread could publish a smaller number
        if not self._is_closed:
            return False
        if not self._is_known.wait(_PATIENCE_S):
            raise RuntimeError(
                f"The ranks were asked to stop by signal {self.request}, but not all {get_world_size()} of them "
                f"answered within {_PATIENCE_S:g} s. One has probably died; see its output."
            ) from self._error
        return self._last is not None and ended >= self._last

    def end(self, *, has_failed: bool) -> None:
        """Stop polling, and return when no other rank needs an answer."""
        self._has_failed = has_failed
        self._is_over.set()
        # Twice, because the thread may wait for an entry and then for the readers of the last batch.
        self._thread.join(2 * _PATIENCE_S)

    def _watch(self) -> None:
        try:
            store = open_store(self._key)
            if self._is_asked(store):
                self._is_closed = True
                self._learn_last(store, str(self._entered))
            elif not self._has_failed:
                # Ranks that are asked to stop later must not wait for this one.
                store.set("last" if get_global_rank() == 0 else _key_of(get_global_rank()), _NEVER)
        except _NoAnswerError as error:
            self._error = error
        except RuntimeError:  # the process with the store is gone, so no answer will come
            self._is_known.set()

    def _is_asked(self, store: Any) -> bool:
        """Block until any rank is asked to stop; return `False` if training on this rank ends first."""
        while not self._is_over.is_set():
            asked = self._ask()
            with _no_fork:
                if asked is not None:
                    store.compare_set("request", "", str(asked))  # the first one counts
                if store.check(["request"]):
                    self.request = int(store.get("request"))
                    return True
            self._is_over.wait(_POLL_S)
        return False

    def _learn_last(self, store: Any, entered: str) -> None:
        """Determine the last batch: rank 0 reads every rank's entry and publishes the maximum."""
        if get_global_rank() == 0:
            said = [entered, *(self._read(store, _key_of(rank)) for rank in range(1, get_world_size()))]
            last = _NEVER if _NEVER in said else str(max(map(int, said)))
            store.set("last", last)
        else:
            store.set(_key_of(get_global_rank()), entered)
            last = self._read(store, "last")
        self._last = None if last == _NEVER else int(last)
        self._is_known.set()
        # Rank 0, whose process may hold the store, waits until every rank has read the last batch.
        if self._last is not None and store.add("learned", 1) == get_world_size():
            store.set("all learned", "")
        if self._last is not None and get_global_rank() == 0:
            self._read(store, "all learned")

    def _read(self, store: Any, key: str) -> str:
        """Return another rank's entry; poll, because a blocking wait could not end with this process."""
        deadline = time.monotonic() + _PATIENCE_S
        while not store.check([key]):
            if self._has_failed or time.monotonic() > deadline:
                raise _NoAnswerError(f"{key!r} was not written")
            time.sleep(_ANSWER_POLL_S)
        return store.get(key).decode()


# A worker of a dataloader that is forked while a thread is inside the store may wait for a C++ lock for ever.
_no_fork = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_no_fork.release)


class _NoAnswerError(Exception):
    """Another rank has not written its entry."""


def _key_of(rank: int) -> str:
    return f"entered/{rank}"


# Schedulers such as Slurm can send SIGUSR1 some time before SIGTERM. Windows does not have it.
TERMINATION_SIGNALS: Final = [signal.SIGTERM] + ([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])

_BUSY_POLL_S: Final = 0.05
_ONE_S: Final = 1.0  # signals closer than this count as one, since launcher and scheduler may both send it


class _Process:
    """State of this process's shutdown.

    Attributes:
        pid: The process id, which differs in a forked child.
        engines: Engines to close; the set does not keep them alive.
        num_busy: The number of running sections that a signal must not interrupt.
        is_asked: Whether a signal is pending for the end of these sections.
        asked_at_s: The time of the first signal during interpreter shutdown.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self.num_busy = 0
        self.is_asked = False
        self.asked_at_s: float | None = None


_process = _Process()


def take_signals(engine: Engine) -> None:
    """Make signals that would kill this process raise `SystemExit`, until the engine is closed or collected.

    Custom handlers and ignored signals are not changed.
    """
    global _process
    if threading.current_thread() is not threading.main_thread():
        return  # Python allows handlers only in the main thread
    if _process.pid != os.getpid():  # a forked child must not close its parent's engines
        _process = _Process()
    _process.engines.add(engine)
    for signum in TERMINATION_SIGNALS:
        if signal.getsignal(signum) == signal.SIG_DFL and is_free_signal(signum):
            signal.signal(signum, end_run)


def close_engine(engine: Engine) -> None:
    """Close the callbacks of an engine, and restore the default signal handlers after the last engine."""
    is_main = threading.current_thread() is threading.main_thread()
    with postponed():
        try:
            engine.close()
        finally:
            _process.engines.discard(engine)
            is_last = is_main and not list(_process.engines)
            for signum in TERMINATION_SIGNALS if is_last else ():
                if signal.getsignal(signum) is end_run:
                    signal.signal(signum, signal.SIG_DFL)
        is_asked = is_main and _process.is_asked
        # Taken over here, so that the waiting thread does not send the signal again.
        _process.is_asked &= not is_asked
    if is_asked:
        raise SystemExit(128 + signal.SIGTERM)


@contextmanager
def postponed() -> Generator[None]:
    """Postpone termination by a signal to the end of the context."""
    _process.num_busy += 1
    try:
        yield
    finally:
        _process.num_busy -= 1


def end_run(signum: int, frame: FrameType | None) -> None:
    """Exit on a signal by `SystemExit`, so that everything is closed.

    Running sections finish first. During interpreter shutdown, a repeated signal ends the process at once.
    """
    if _process.pid != os.getpid():  # a forked child behaves as without this handler
        _end_at_once(signum)
    elif not threading.main_thread().is_alive():  # interpreter shutdown, which joins threads and closes the rest
        now_s = time.monotonic()
        if _process.asked_at_s is None:
            _process.asked_at_s = now_s
        elif now_s - _process.asked_at_s > _ONE_S:
            _end_at_once(signum)
    elif _is_busy():
        if not _process.is_asked:
            _process.is_asked = True
            # From a thread, because the handler must return before the busy section can end.
            threading.Thread(target=_ask_again, args=(signum,), name="composer-signal", daemon=True).start()
    elif _process.is_asked or list(_process.engines):
        _process.is_asked = False
        raise SystemExit(128 + signal.SIGTERM)
    else:
        _end_at_once(signum)


def is_free_signal(signum: int) -> bool:
    """Return whether a signal has no handler unknown to Python, such as one of `faulthandler.register`.

    Without /proc, there is assumed to be none.
    """
    try:
        with open("/proc/self/status") as status:
            caught = next((line.split()[1] for line in status if line.startswith("SigCgt:")), "0")
    except OSError:
        return True
    # The bit mask begins with signal 1.
    return not int(caught, 16) >> (signum - 1) & 1


def _is_busy() -> bool:
    return _process.num_busy > 0 or is_closing()


def _ask_again(signum: int) -> None:
    """Send a signal again after all busy sections, unless `close_engine` raised; `__del__` would swallow an exit."""
    time.sleep(_BUSY_POLL_S)
    while _is_busy():
        time.sleep(_BUSY_POLL_S)
    if _process.is_asked:
        os.kill(os.getpid(), signum)


def _end_at_once(signum: int) -> None:
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


_SIGNALS = [*TERMINATION_SIGNALS, signal.SIGINT]
# Handlers that would end the process in the middle of a batch.
_NOT_CALLED = (signal.default_int_handler, end_run)

# The logger that `python_log_level` of a Trainer configures.
_log = logging.getLogger("composer.trainer.trainer")


@dataclass(slots=True, eq=False)
class Preemption:
    """Stop of training by a signal to any rank, on all ranks after the same batch.

    The exit status is 143 for SIGTERM and SIGUSR1, 130 for SIGINT. A second SIGINT raises `KeyboardInterrupt` at once.
    """

    _state: State
    _logger: Logger
    _saver: CheckpointSaver | None
    _received: int | None = None
    _previous: dict[int, Any] = field(default_factory=dict[int, Any])
    _agreement: StopAgreement | None = None

    @contextmanager
    def watched(self) -> Generator[None]:
        """Handle signals in the context if it runs in the main thread; previous handlers are restored at its end.

        Every rank must enter this.
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
            # `leave_if_asked` exits this way, which is not a failure.
            has_failed = not self._is_agreed()
            raise
        finally:
            if self._agreement is not None:
                self._agreement.end(has_failed=has_failed)
            self._restore()
        if self._received is not None or self._is_agreed():
            raise self._exit()

    def leave_if_asked(self) -> None:
        """Save a checkpoint and exit, if all ranks stop after the batch that has just ended."""
        if self._agreement is None:
            is_asked = self._received is not None
        else:
            is_asked = self._agreement.stops_here()
        if is_asked:
            self._save()
            raise self._exit()

    def _handle(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows handlers only in the main thread
        for signum in _SIGNALS:
            previous = signal.getsignal(signum)
            # An ignored signal stays ignored, as under nohup; a handler unknown to Python could not be restored.
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
            self._log_stop(batch, "Nothing is saved: give save_folder to resume next time.")
            return
        # A save in the background must finish before the next one, and before the exit.
        saver.wait(state, self._logger)
        if saver.last_checkpoint_batch != state.timestamp.batch:
            saver.save(state, self._logger)
        saver.wait(state, self._logger)
        if get_global_rank() == 0:
            self._log_stop(batch, f"A checkpoint is saved: {', '.join(saver.saved_checkpoints[-1:]) or saver.folder}")

    def _log_stop(self, batch: int, consequence: str) -> None:
        with tqdm.external_write_mode(sys.stderr):  # on a line of its own, above the progress bars
            name = signal.Signals(self._signal()).name
            _log.warning("Training stops after batch %d because of %s. %s", batch, name, consequence)

    def _exit(self) -> SystemExit:
        return SystemExit(128 + (signal.SIGINT if self._signal() == signal.SIGINT else signal.SIGTERM))

    def _signal(self) -> int:
        """Return the first signal of any rank, which ends the training."""
        agreed = None if self._agreement is None else self._agreement.request
        signum = self._received if agreed is None else agreed
        assert signum is not None
        return signum
