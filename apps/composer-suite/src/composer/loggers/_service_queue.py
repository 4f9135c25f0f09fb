"""Base class of loggers for services, which call them through a bounded queue and a thread."""

import atexit
import logging
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from shutil import copyfile, rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, TypeVar

from composer.loggers._logged_values import LoggedImages, PixelsAndMasks, Snapshot
from composer_dist import dist, get_global_rank
from composer_events.arguments import check_seconds
from composer_events.logger_destination import LoggerDestination
from composer_models import MissingConditionalImportError

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = [
    "PATIENCE_S",
    "Outbox",
    "QueuedLogger",
    "fatal_error",
    "id_of_uncaught",
    "open_on_ranks",
    "require",
    "warn_logging_problem",
]

PATIENCE_S = 120.0
"""Seconds that the start and the end of a run wait for a service."""

_CAPACITY_BYTES = 64 * 2**20  # of values that wait for a slow service

_log = logging.getLogger("composer.loggers")

TResult = TypeVar("TResult")


class Outbox:
    """Queue of calls to a service, made in order by a separate thread, so that training never waits for them.

    - The memory of the queue is bounded. When it is full, new calls are dropped instead of queued ones, so that the
      sent values have no gaps. Calls with `is_kept`, such as hyperparameters and the end of the run, are never dropped,
      and an empty queue accepts a call of any size.
    - If a call raises, the others are still made. Errors are counted, and logged at level DEBUG.
    - A failing service causes one `RuntimeWarning`. Later messages, such as the number of dropped calls, are logged.
    - `drain` and `close` wait at most `patience_s` for pending calls, and warn about the rest. The thread is a daemon,
      so a service that hangs cannot keep the process alive.

    Before `open` or `begin`, calls are queued but not made. After `close`, the queue can be opened again.

    Args:
        service: The name of the service in warnings.
        patience_s: Seconds to wait in `open`, `drain` and `close`.
    """

    def __init__(self, service: str, *, patience_s: float = PATIENCE_S) -> None:
        check_seconds(may_be_zero=True, patience_s=patience_s)
        self.service, self.patience_s = service, patience_s
        self._line = _Line()

    @property
    def is_open(self) -> bool:
        """True while the thread runs: after `open` or `begin`, until `close`."""
        return self._line.thread is not None

    @property
    def is_down(self) -> bool:
        """True if the first call has failed, so that no others are made."""
        return self._line.is_down

    @property
    def num_errors(self) -> int:
        """The number of calls that raised."""
        return self._line.num_errors

    def begin(self) -> None:
        """Start the thread, for a service that needs no first call."""
        self._start(self._line)
        atexit.register(self.drain)

    def open(self, connect: Callable[[], TResult], *raised: type[Exception]) -> TResult | None:
        """Make the first call, wait for it, and start making the queued calls.

        Args:
            connect: The first call.
            *raised: Exception types that the user must fix, such as those for a wrong argument. They are raised here.

        Returns:
            The value of `connect`. `None`, with a warning, if it raised, in which case no calls are made, or if it
            takes too long, in which case later calls wait for it.
        """
        line, answer = self._line, Future[TResult]()
        # At the front, before calls that were queued before the run started.
        line.waiting.appendleft((lambda: _connect(line, connect, answer), 0))
        self._start(line)
        # Unlike `answer.result(timeout)`, this cannot confuse a timeout with a TimeoutError raised by `connect`.
        wait([answer], self.patience_s)
        # Exit handlers run in reverse order, so this drains before the service's client shuts down.
        atexit.register(self.drain)
        if not answer.done():
            self._warn(
                line, f"has not answered within {self.patience_s:g} s. Training continues, and logged values wait."
            )
            return None
        error = answer.exception()
        if error is None:
            return answer.result()
        if isinstance(error, raised):
            raise error
        self._warn(line, f"cannot be reached, so nothing is logged there: {_named(error)}")
        return None

    def post(self, call: Callable[[], Any], *, size_bytes: int = 0, is_kept: bool = False) -> None:
        """Queue a call, and return at once.

        Args:
            call: The call. Its return value is ignored.
            size_bytes: Approximate memory that it takes in the queue.
            is_kept: Whether it must not be dropped.
        """
        line = self._line
        with line.changed:
            # An empty queue accepts anything, or a call larger than its capacity could never be made.
            has_room = not line.size_bytes or line.size_bytes + size_bytes <= _CAPACITY_BYTES
            if not line.is_down and (is_kept or has_room):
                line.waiting.append((call, size_bytes))
                line.size_bytes += size_bytes
                line.changed.notify_all()
                return
            line.num_dropped += 1
            is_first = line.num_dropped == 1 and not line.is_down
        if is_first:
            self._warn(
                line,
                f"is slower than what is logged: {len(line.waiting)} calls wait and fill the "
                f"{_CAPACITY_BYTES / 2**20:g} MiB of the queue. Logged values are dropped meanwhile. Log less.",
            )

    def drain(self) -> bool:
        """Wait until all calls are done, and return whether they are."""
        line = self._line
        if line.thread is None:
            return not line.waiting  # no thread runs before `open`
        patience_s = 0.0 if line.has_given_up else self.patience_s  # wait only once for a hanging service
        with line.changed:
            line.changed.wait_for(lambda: not line.num_left, patience_s)
            num_left = line.num_left
        if num_left and not line.has_given_up:
            line.has_given_up = True
            self._warn(line, f"is not done after {patience_s:g} s: the last {num_left} calls to it may be lost.")
        return not num_left

    def close(self, finish: Callable[[], Any] | None = None) -> None:
        """Make the last call, wait until all are done, and end the thread.

        Args:
            finish: The last call, made only if the first one succeeded.
        """
        line = self._line
        if line.thread is None:
            return
        if finish is not None:
            self.post(finish, is_kept=True)
        with line.changed:
            line.is_closing = True
            line.changed.notify_all()
        if self.drain():
            line.thread.join()
        atexit.unregister(self.drain)
        if line.num_errors > 1 or line.num_dropped > 1:
            _log.info("%s: %d calls failed and %d were dropped.", self.service, line.num_errors, line.num_dropped)
        self._line = _Line()  # a new one, since a hanging thread may still use the old one

    def __getstate__(self) -> dict[str, Any]:
        return {"service": self.service, "patience_s": self.patience_s}  # threads cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def _start(self, line: "_Line") -> None:
        line.thread = threading.Thread(target=self._work, args=(line,), name=f"composer-{self.service}", daemon=True)
        line.thread.start()

    def _work(self, line: "_Line") -> None:
        while True:
            with line.changed:
                while not line.waiting:
                    if line.is_closing:
                        return
                    line.changed.wait()
                call, size_bytes = line.waiting.popleft()
                line.is_busy = True
            try:
                # Outside the lock, since `post` would otherwise wait for the service.
                call()
            except Exception as error:
                self._take_error(line, error)
            with line.changed:
                line.is_busy = False
                line.size_bytes -= size_bytes
                line.changed.notify_all()

    def _take_error(self, line: "_Line", error: Exception) -> None:
        line.num_errors += 1
        if line.num_errors == 1:
            self._warn(line, f"did not take what was logged; training continues: {_named(error)}")
        _log.debug("%s did not take what was logged.", self.service, exc_info=error)

    def _warn(self, line: "_Line", text: str) -> None:
        message = f"{self.service} {text}"
        if line.has_warned:
            _log.warning(message)
            return
        line.has_warned = True
        warn_logging_problem(message)


@dataclass(slots=True, eq=False)
class _Line:
    """State of the queue and its thread, changed only under `changed`."""

    waiting: deque[tuple[Callable[[], Any], int]] = field(default_factory=deque)
    changed: threading.Condition = field(default_factory=threading.Condition)
    thread: threading.Thread | None = None
    size_bytes: int = 0
    num_errors: int = 0
    num_dropped: int = 0
    is_busy: bool = False
    is_closing: bool = False
    is_down: bool = False
    has_given_up: bool = False
    has_warned: bool = False

    @property
    def num_left(self) -> int:
        return len(self.waiting) + self.is_busy


def _connect(line: _Line, connect: Callable[[], TResult], answer: Future[TResult]) -> None:
    try:
        result = connect()
    except Exception as error:
        with line.changed:
            line.is_down = True
            line.waiting.clear()  # they will never be made, so their values need not stay in memory
            line.size_bytes = 0
        answer.set_exception(error)
    else:
        answer.set_result(result)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class QueuedLogger(LoggerDestination):
    """Base class of loggers that make all calls to a service, in order, through an `Outbox`.

    The methods `_send_...` run on its thread, with values that are on the host.

    Args:
        rank_zero_only: Whether only rank 0 logs.
        patience_s: Seconds that the start and the end of the run wait for the service.
    """

    _images_name = "Images"
    _shows_masks = False

    def __init__(self, rank_zero_only: bool, patience_s: float) -> None:
        self._enabled = not rank_zero_only or get_global_rank() == 0
        self._outbox = Outbox(type(self).__name__, patience_s=patience_s)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Log hyperparameters."""
        self._post(self._send_hyperparameters, hyperparameters, is_kept=True)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log metrics at a step."""
        self._post(self._send_metrics, metrics, step)

    def log_images(
        self,
        images: Any,
        name: str | None = None,
        channels_last: bool = False,
        step: int | None = None,
        masks: dict[str, Any] | None = None,
        mask_class_labels: dict[int, str] | None = None,
        use_table: bool = False,
    ) -> None:
        """Log images, with masks and in a table if the service shows them.

        Raises:
            ValueError: If an item is not an image, or masks do not fit the images.
        """
        if self._enabled:
            logged = LoggedImages(images, channels_last, masks if self._shows_masks else None)
            more = name or self._images_name, step, mask_class_labels, use_table
            self._outbox.post(lambda: self._send_images(logged.read(), *more), size_bytes=logged.size_bytes)

    def fit_end(self, state: "State", logger: "Logger") -> None:
        """Wait until all calls to the service are done."""
        self._outbox.drain()

    def _send_hyperparameters(self, values: dict[str, Any]) -> None:
        raise NotImplementedError

    def _send_metrics(self, values: dict[str, Any], step: int | None) -> None:
        raise NotImplementedError

    def _send_images(
        self, images: PixelsAndMasks, name: str, step: int | None, labels: dict[int, str] | None, use_table: bool
    ) -> None:
        raise NotImplementedError

    def _post(self, send: Callable[..., None], values: Mapping[str, Any], *rest: Any, is_kept: bool = False) -> None:
        """Queue a call with a copy of values, if this rank logs."""
        if self._enabled:
            snapshot = Snapshot(values)  # now, since tensors may be changed in place before the call is made
            size_bytes = 0 if is_kept else snapshot.size_bytes
            self._outbox.post(lambda: send(snapshot.read(), *rest), size_bytes=size_bytes, is_kept=is_kept)

    def _post_file(self, file: Path, send: Callable[[Path], None]) -> None:
        """Queue a call with a copy of a file, which may change before it is sent."""
        # In a folder of its own, so that the copy keeps the file's name.
        folder = Path(mkdtemp(prefix=f"composer-{self._outbox.service}-"))
        copy = folder / file.name

        def call() -> None:
            try:
                send(copy)
            finally:
                rmtree(folder, ignore_errors=True)

        # Deletes the copy if the call is dropped. Not at interpreter exit, when services may still upload.
        weakref.finalize(call, rmtree, folder, ignore_errors=True).atexit = False
        copyfile(file, copy)
        self._outbox.post(call, is_kept=True)


def open_on_ranks(
    outbox: Outbox, connect: Callable[[], TResult], *raised: type[Exception], is_enabled: bool = True
) -> list[TResult | None]:
    """Open an outbox on the ranks that use it, and return the result of each rank. Every rank must call this.

    Args:
        outbox: The outbox.
        connect: The first call.
        *raised: Exception types that the user must fix. They are raised on all ranks.
        is_enabled: Whether this rank opens it.

    Returns:
        By rank, the value of `connect`; `None` if it was not called, raised or took too long.
    """
    found, error = None, None
    if is_enabled:
        try:
            found = outbox.open(connect, *raised)
        except raised as caught:
            error = caught
    # Also after an error: the other ranks would wait for this rank otherwise.
    told = dist.all_gather_object((found, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    for rank, (_, text) in enumerate(told):
        if text is not None:
            raise RuntimeError(
                f"rank {get_global_rank()} stops, since {outbox.service} has failed on rank {rank}: {text}"
            )
    return [result for result, _ in told]


def require(module: str, *, extra: str, package: str | None = None) -> Any:
    """Import a library of an optional extra of this distribution.

    Args:
        module: The module.
        extra: The extra that brings it.
        package: Its name in package registries; by default that of the module.

    Raises:
        MissingConditionalImportError: If it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        top = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != top:
            raise  # one of the installed library's own dependencies is missing
        raise MissingConditionalImportError(extra, package or top.replace("_", "-")) from error


def id_of_uncaught() -> int | None:
    """Return the id of the last uncaught exception. A reference would keep its frames, with their tensors, alive."""
    return None if getattr(sys, "last_value", None) is None else id(sys.last_value)


def fatal_error(*, was_busy: bool, id_of_earlier: int | None) -> BaseException | None:
    """Return the exception being handled or, if work was left undone, the one that has ended the process.

    At interpreter exit, the exception is no longer being handled, and only `sys.last_value` refers to it.

    Args:
        was_busy: Whether work was left undone.
        id_of_earlier: The id of an exception raised before the run, for example in an earlier cell of a notebook.
    """
    error = sys.exc_info()[1]
    if error is None and was_busy and id_of_uncaught() not in (None, id_of_earlier):
        return sys.last_value
    return error


def warn_logging_problem(message: str) -> None:
    """Issue a `RuntimeWarning`, or log it if warnings are errors, since a logger must not end training."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        _log.warning(message)
