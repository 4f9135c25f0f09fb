"""Base class of loggers for services, which call them through a bounded queue and a thread, with copies of values."""

import atexit
import logging
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from shutil import copyfile, rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from composer_dist import dist, get_global_rank
from composer_events.arguments import check_seconds
from composer_events.logger_destination import LoggerDestination, detached_copy, format_log_data_value, map_values
from composer_models import MissingConditionalImportError

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = [
    "LoggedImages",
    "Outbox",
    "PATIENCE_S",
    "PixelsAndMasks",
    "QueuedLogger",
    "Snapshot",
    "as_number",
    "fatal_error",
    "id_of_uncaught",
    "open_on_ranks",
    "require",
    "to_8_bits",
    "warn_logging_problem",
]

PixelsAndMasks: TypeAlias = "Iterator[tuple[NDArray[np.uint8], dict[str, NDArray[Any]]]]"


class LoggedImages:
    """Copy of images at the time of logging. Shapes are checked immediately, pixels are read later."""

    def __init__(self, images: Any, channels_last: bool = False, masks: Mapping[str, Any] | None = None) -> None:
        self._snapshot = Snapshot({"images": images, "masks": dict(masks or {})})
        images = _one_by_one(self._snapshot.values["images"], 3)
        self._images = [_to_hwc(image, channels_last) for image in images]
        self._masks = {
            name: _to_masks(name, stack, len(images)) for name, stack in self._snapshot.values["masks"].items()
        }

    @property
    def size_bytes(self) -> int:
        """The approximate memory of the copies, in bytes."""
        return self._snapshot.size_bytes

    @property
    def num_channels(self) -> set[int]:
        """The numbers of channels of the images."""
        return {image.shape[2] for image in self._images}

    def read(self) -> PixelsAndMasks:
        """Wait for the copies, and yield each image, with values from 0 to 255, and its masks."""
        self._snapshot.wait()
        for index, image in enumerate(self._images):
            yield to_8_bits(_to_numpy(image)), {name: _to_numpy(masks[index]) for name, masks in self._masks.items()}


def to_8_bits(image: NDArray[Any]) -> NDArray[np.uint8]:
    """Convert an image to values from 0 to 255: booleans and floats in [0, 1] are scaled, others are clipped."""
    # The range of floats is not part of their type: images in [0, 1] and in [0, 255] are both common.
    if image.dtype == bool or (np.issubdtype(image.dtype, np.floating) and image.min() >= 0 and image.max() <= 1):
        image = np.round(image * 255.0)
    return image.clip(0, 255).astype(np.uint8)


def _one_by_one(images: Any, max_axes: int) -> list[torch.Tensor]:
    if isinstance(images, Sequence):
        return [torch.as_tensor(image) for image in images]
    stack = torch.as_tensor(images)
    return [stack] if stack.ndim <= max_axes else list(stack)


def _to_hwc(image: torch.Tensor, channels_last: bool) -> torch.Tensor:
    squeezed = image.squeeze()
    if image.numel() == 0 or image.ndim < 2 or squeezed.ndim > 3:
        raise ValueError(
            f"an image of shape {tuple(image.shape)} cannot be shown. An image has a height, a width and perhaps "
            f"channels, none of them 0; several images go into a list, or into one array along its first axis."
        )
    if squeezed.ndim < 3:
        return squeezed.reshape(*squeezed.shape, *[1] * (3 - squeezed.ndim))
    return squeezed if channels_last else squeezed.movedim(0, -1)


def _to_masks(name: str, stack: Any, num_images: int) -> list[torch.Tensor]:
    masks = [mask.squeeze() for mask in _one_by_one(stack, 2)]
    if len(masks) != num_images:
        raise ValueError(f"masks[{name!r}] has {len(masks)} masks for {num_images} images. Give one for each image.")
    for mask in masks:
        if mask.ndim != 2:
            raise ValueError(
                f"masks[{name!r}] has a mask of shape {tuple(mask.shape)}. A mask must have the axes height and width, "
                f"with the class index of each pixel."
            )
    return masks


def _to_numpy(values: torch.Tensor) -> NDArray[Any]:
    # NumPy has no bfloat16, and half precision is too coarse for scaling.
    return (values.float() if values.dtype in (torch.bfloat16, torch.float16) else values).numpy()


_BYTES_OF_A_NUMBER = 128  # approximate size of a name and a number in Python


class Snapshot:
    """Copy of values by name.

    Tensors on an accelerator are copied asynchronously: the copy is queued after the work that computes them, and only
    reading synchronizes. The types and shapes in `values` are valid immediately, the contents of tensors only after
    `wait`.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._arrivals: dict[torch.device, torch.Event] = {}
        self.size_bytes = 0
        self.values: dict[str, Any] = {name: map_values(self._take, value) for name, value in values.items()}
        for device, arrival in self._arrivals.items():
            # One event for all copies of a device, since a stream runs them in order.
            arrival.record(torch.accelerator.current_stream(device))

    def is_ready(self) -> bool:
        """Return whether `read` does not wait: all copies have arrived, or the device has failed and it raises."""
        try:
            return all(arrival.query() for arrival in self._arrivals.values())
        except RuntimeError:  # the device has failed
            return True

    def wait(self) -> None:
        """Wait until the values are on the host."""
        for arrival in self._arrivals.values():
            arrival.synchronize()

    def read(self) -> dict[str, Any]:
        """Wait, and return the values, with one-element tensors as numbers."""
        self.wait()
        return {name: map_values(_to_number, value) for name, value in self.values.items()}

    def _take(self, value: Any) -> Any:
        self.size_bytes += _BYTES_OF_A_NUMBER + _size_bytes(value)
        if isinstance(value, torch.Tensor) and value.is_meta:
            return format_log_data_value(value)  # meta tensors have no data
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            return detached_copy(value)
        self._arrivals.setdefault(value.device, torch.Event(value.device))
        return value.detach().to("cpu", non_blocking=True)  # to pinned memory, so the host does not wait


def _size_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        return int(value.element_size() * value.numel())  # an upper bound for sparse tensors
    return int(getattr(value, "nbytes", 0))


def _to_number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def as_number(value: Any) -> float | None:
    """Return a value as a float for a curve, or `None` if it is not a number."""
    if isinstance(value, str):
        return None
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except Exception:  # arrays, tensors and foreign objects raise various errors
        return None


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

        Exceptions of the types `raised`, such as those for a wrong argument, are raised here.

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
        """Queue a call that takes about `size_bytes` of memory, and return at once. Kept calls are never dropped."""
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
        """Make the last call, if the first one succeeded, wait until all are done, and end the thread."""
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
                line.num_errors += 1
                if line.num_errors == 1:
                    self._warn(line, f"did not take what was logged; training continues: {_named(error)}")
                _log.debug("%s did not take what was logged.", self.service, exc_info=error)
            with line.changed:
                line.is_busy = False
                line.size_bytes -= size_bytes
                line.changed.notify_all()

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
            self._check_images(name or self._images_name, logged.num_channels, bool(masks or mask_class_labels))
            more = name or self._images_name, step, mask_class_labels, use_table
            self._outbox.post(lambda: self._send_images(logged.read(), *more), size_bytes=logged.size_bytes)

    def _check_images(self, name: str, num_channels: set[int], has_masks: bool) -> None:
        """Raise or warn if the service does not show such images."""

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

    Exceptions of the types `raised` are raised on all ranks. A result is `None` if `connect` was not called, raised
    another exception, or took too long.
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
    """Import a library of an optional extra of this distribution; `package` is its name in package registries."""
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
    `id_of_earlier` is that of an exception raised before the run, for example in an earlier cell of a notebook.
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
