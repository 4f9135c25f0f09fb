"""Destinations of logged values and files."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias, TypeGuard, cast
from weakref import WeakMethod

from composer_events.arguments import loaded
from composer_events.batches import is_tensor
from composer_events.callback import Callback

if TYPE_CHECKING:
    from pathlib import Path

    from composer_events.state import State
    from composer_time import Timestamp

__all__ = [
    "BufferedDestination",
    "LoggedMetrics",
    "MetricBuffer",
    "format_log_data_value",
    "is_tensor",
    "LoggerDestination",
    "UNCHANGING",
    "as_of_now",
    "detached_copy",
    "kept_metrics",
    "map_values",
    "restored",
]


class LoggerDestination(Callback, ABC):
    """Base class of destinations for values and files, such as a file, a console or a service.

    Every method does nothing unless a subclass overrides it, and the `Logger` calls only overridden methods. A
    destination is a callback too. On `Event.INIT` it acts before the other callbacks, so that they can log; on all
    other events after them, so that it can write what they logged.

    Example:
        >>> class Remember(LoggerDestination):
        ...     def __init__(self):
        ...         self.metrics = {}
        ...     def log_metrics(self, metrics, step=None):
        ...         self.metrics.update(metrics)
    """

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Log the settings of the run.

        Args:
            hyperparameters: By name.
        """

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log numbers measured at one step.

        Args:
            metrics: By name. Tensors may still be on their device.
            step: The count of batches that they belong to.
        """

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Log a table.

        Args:
            columns: Names of the columns.
            rows: A list of cells for each row.
            name: Name of the table.
            step: The count of batches that it belongs to.
        """

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: dict[str, Any] | None = None,
        mask_class_labels: dict[int, str] | None = None,
        use_table: bool = True,
    ) -> None:
        """Log images.

        Args:
            images: An array, a tensor, or a sequence of them; each an image or a stack of images.
            name: Name of the group of images.
            channels_last: Whether channels are the last axis, not the one before height and width.
            step: The count of batches that they belong to.
            masks: Segmentation masks by name, as many as images.
            mask_class_labels: Names of the classes in the masks.
            use_table: Whether to show the images in a table, where the destination can.
        """

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Log records of the run's behavior, such as the algorithms that acted on an event.

        Args:
            traces: By name.
        """

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Upload a file. The caller may change or delete it as soon as this returns.

        Args:
            state: The training state.
            remote_file_name: Name of the uploaded file.
            file_path: Path of the local file.
            overwrite: Whether a file of that name may be replaced.
        """

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Download a file that was uploaded.

        Args:
            remote_file_name: Name of the uploaded file.
            destination: Local path to write to.
            overwrite: Whether a file at `destination` may be replaced.
            progress_bar: Whether to show the progress.

        Raises:
            NotImplementedError: If the destination does not keep files.
        """
        raise NotImplementedError(
            f"{type(self).__name__} keeps no files, so {remote_file_name!r} cannot be downloaded from it. "
            f"Ask a destination whose `can_upload_files()` is True."
        )

    def can_upload_files(self) -> bool:
        """Return whether the destination keeps files that are passed to `upload_file`."""
        return False


UNCHANGING: Final = frozenset({bool, int, float, str, type(None)})
"""Types of immutable values, which need no copy."""


def detached_copy(value: Any) -> Any:
    """Return a copy of a value. The copy of a tensor stays on its device and is detached from the graph.

    Args:
        value: A number, tensor, array, text, or a container of these. Anything else that cannot be copied, such as an
            open file, is returned unchanged.
    """
    if type(value) in UNCHANGING:
        return value
    if is_tensor(value):
        return value.detach().clone() if value.requires_grad else value.clone()
    if isinstance(value, dict) or type(value) in (list, tuple):
        return map_values(detached_copy, value)
    try:
        return copy.deepcopy(value)
    except Exception:  # a copy method of another library may raise any error
        return value


def kept_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of metrics with their current values, without a device synchronization.

    Args:
        metrics: By name.

    Returns:
        Copies by name. Read each through `restored`.

    Example:
        >>> losses = [0.5, 0.25]
        >>> kept = kept_metrics({"losses": losses})
        >>> losses.clear()
        >>> restored(kept["losses"])
        [0.5, 0.25]
    """
    return as_of_now(metrics)[1]


def as_of_now(metrics: Mapping[str, Any], copies: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return metrics detached from the graph, and copies of them with their current values.

    Args:
        metrics: By name.
        copies: Whether to copy, as `kept_metrics` does. Otherwise the same dict is returned twice.
    """
    torch = loaded("torch")
    tensor = None if torch is None else torch.Tensor
    kept: dict[str, Any] = {}
    copied: dict[str, Any] = {} if copies else kept
    for name, value in metrics.items():
        if type(value) in UNCHANGING:
            kept[name] = copied[name] = value
        elif type(value) is tensor and value.is_cpu and value.ndim == 0 and not value.requires_grad:
            kept[name] = value
            if copies:  # reading the number takes a third of the time of copying the tensor
                dtype = value.dtype
                copied[name] = _Scalar((value.item(), dtype)) if dtype.is_floating_point else detached_copy(value)
        else:
            kept[name] = map_values(_without_graph, value)
            if copies:
                copied[name] = detached_copy(kept[name])
    return kept, copied


def _without_graph(value: Any) -> Any:
    return value.detach() if is_tensor(value) and value.requires_grad else value


def restored(value: Any) -> Any:
    """Return the original value of an entry of `kept_metrics`.

    Args:
        value: The value.
    """
    if type(value) is not _Scalar:
        return value
    number, dtype = value
    return loaded("torch").tensor(number, dtype=dtype, device="cpu")


def map_values(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the elements of a container, or to a value that is not a container.

    Args:
        change: Called with each element.
        value: A dict, list or tuple, nested or not, or anything else.
    """
    if isinstance(value, dict):
        return {key: map_values(change, element) for key, element in cast("dict[Any, Any]", value).items()}
    if type(value) in (list, tuple):
        return type(value)(map_values(change, element) for element in value)
    return change(value)


class _Scalar(tuple[Any, Any]):
    """Value and dtype of a scalar tensor, which `restored` converts back."""

    __slots__ = ()


_MOST_KEPT: Final = 256  # calls; a bound on the memory of destinations that never call `catch_up`
# A thread that reads a destination delivers, too. One lock for all, because a lock cannot be copied or pickled.
_HANDING_OVER: Final = RLock()
_are_unchanging: Final = UNCHANGING.issuperset

LoggedMetrics: TypeAlias = "tuple[dict[str, Any], dict[str, Any], Timestamp | None, int | None]"
"""Record of one logging call: the metrics as passed; copies with the values at that time, to be read with `restored`,
or the same dict again if no destination sets `copies_values`; the time, or `None` if a destination was called
directly; and the step, if the caller passed one."""

_Noted: TypeAlias = "tuple[dict[str, Any] | Callable[..., dict[str, Any]], Any, Timestamp | None, Hashable | None]"
"""Of a function, the last entry is the key of what it replaces."""


class BufferedDestination(LoggerDestination):
    """Base class of destinations that receive the metrics of many calls at once.

    A training step logs several times to each destination. A destination that reads the values only every few batches
    or at the end need not be called each time, so it overrides `take_metrics`. The `Logger` buffers the metrics and
    delivers them when the buffer is full or when the destination calls `catch_up`, which it must do before it uses its
    metrics. If `log_metrics` is overridden, in a subclass or on the object, the destination is called each time like
    any other. The engine delivers everything before it closes a callback.

    Attributes:
        copies_values: Whether it needs values as of the logging call, though tensors may have changed since.
        takes_latest: Whether it needs only the latest values, so that earlier ones need not be computed; see
            `replaces` of `log_lazily`.

    Example:
        >>> from types import SimpleNamespace
        >>> from composer_events import Logger
        >>> from composer_time import Timestamp
        >>> class Summary(BufferedDestination):
        ...     losses = ()
        ...     def take_metrics(self, logged):
        ...         self.losses = (*self.losses, *(metrics["loss"] for metrics, *_ in logged))
        ...     def epoch_end(self, state, logger):
        ...         self.catch_up()
        ...         print(self.losses)
        >>> state, summary = SimpleNamespace(timestamp=Timestamp()), Summary()
        >>> logger = Logger(state, summary)
        >>> logger.log_metrics({"loss": 0.5})
        >>> logger.log_metrics({"loss": 0.25})
        >>> summary.losses
        ()
        >>> summary.epoch_end(state, logger)
        (0.5, 0.25)
    """

    copies_values: ClassVar[bool] = False
    takes_latest: ClassVar[bool] = False
    _buffers: tuple[MetricBuffer, ...] = ()  # one for each logger that writes to it

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and notify the loggers if it is `log_metrics`, which tests replace."""
        if name != "log_metrics":
            super().__setattr__(name, value)
            return
        if value == BufferedDestination.log_metrics.__get__(self):  # a test restores the original method
            vars(self).pop(name, None)
        else:
            super().__setattr__(name, value)
        self._sort_anew()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name == "log_metrics":
            self._sort_anew()

    @abstractmethod
    def take_metrics(self, logged: Sequence[LoggedMetrics]) -> None:
        """Process the metrics logged since the last delivery.

        Args:
            logged: One record per logging call, in order.
        """

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Process numbers measured at one step immediately.

        Args:
            metrics: By name.
            step: The count of batches that they belong to.
        """
        self.catch_up()  # first, to keep the order of the calls
        copies = kept_metrics(metrics) if self.copies_values else metrics
        self.take_metrics([(metrics, copies, None, step)])

    def catch_up(self) -> None:
        """Deliver all buffered metrics to `take_metrics`."""
        for buffer in self._buffers:
            buffer.deliver()

    def attach(self, buffer: MetricBuffer) -> None:
        """Register a logger's buffer for `catch_up`. Called by `Logger`."""
        if buffer not in self._buffers:
            self._buffers = (*self._buffers, buffer)

    def _sort_anew(self) -> None:
        for buffer in self._buffers:
            buffer.sort_anew()


class MetricBuffer:
    """Buffer of logged metrics for the destinations that receive them late.

    Args:
        sort_anew: A method to call when a destination's `log_metrics` is replaced. Referenced weakly.

    Attributes:
        destinations: The receivers. Assigning others first delivers to the old ones.
    """

    def __init__(self, sort_anew: Callable[[], None]) -> None:
        self._sort_anew: WeakMethod[Callable[[], None]] | None = WeakMethod(sort_anew)
        # For metrics that are computed on delivery, the function takes the place of the metrics.
        self._noted: list[_Noted] = []
        self._destinations: tuple[BufferedDestination, ...] = ()
        self._copies = self._takes_latest = False
        self._seen: Timestamp | None = None
        self._now: Timestamp | None = None  # a copy, because loading a state changes the one seen in place
        self._batch = -1  # batch count of the copy

    @property
    def destinations(self) -> tuple[BufferedDestination, ...]:
        """Destinations that receive the buffered metrics."""
        return self._destinations

    @destinations.setter
    def destinations(self, destinations: tuple[BufferedDestination, ...]) -> None:
        try:
            self.deliver()
        finally:  # even if an old destination fails
            self._destinations = destinations
            self._copies = any(place.copies_values for place in destinations)
            self._takes_latest = all(place.takes_latest for place in destinations)
            for place in destinations:
                place.attach(self)

    def sort_anew(self) -> None:
        """Make the logger determine again which of its destinations receive metrics late."""
        sort = None if self._sort_anew is None else self._sort_anew()
        if sort is not None:
            sort()

    def note(self, metrics: dict[str, Any], timestamp: Timestamp, step: int | None) -> None:
        """Buffer the metrics of one logging call."""
        if timestamp is not self._seen or timestamp.num_batches != self._batch:
            self._look_at(timestamp)
        self._noted.append((*_as_of_now(metrics, self._copies), self._now, step))
        if len(self._noted) >= _MOST_KEPT:
            self.deliver()

    def note_call(
        self,
        compute: Callable[..., dict[str, Any]],
        arguments: Sequence[Any],
        timestamp: Timestamp,
        replaces: Hashable | None = None,
    ) -> None:
        """Buffer a function whose result is to be logged, and call it on delivery."""
        if timestamp is not self._seen or timestamp.num_batches != self._batch:
            self._look_at(timestamp)
        self._noted.append((compute, arguments, self._now, replaces))
        if len(self._noted) >= _MOST_KEPT:
            self.deliver()

    def deliver(self) -> None:
        """Deliver everything in the buffer to all destinations."""
        if not self._noted:
            return
        with _HANDING_OVER, ExitStack() as rest:  # callbacks all run, even if a destination fails
            noted = self._noted[:]
            del self._noted[: len(noted)]  # not clear(), because another thread may append in the meantime
            if logged := self._computed(_latest(noted) if self._takes_latest else noted, rest):
                # Callbacks of an ExitStack run in reverse order.
                for place in reversed(self._destinations):
                    rest.callback(_hand_to, place, logged)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the logger: a copy of a destination must not copy or pickle the whole run."""
        return {**vars(self), "_sort_anew": None}

    def _look_at(self, timestamp: Timestamp) -> None:
        self._seen, self._now, self._batch = timestamp, timestamp.copy(), timestamp.num_batches

    def _computed(self, noted: Sequence[_Noted], rest: ExitStack) -> list[LoggedMetrics]:
        """Return the buffered metrics with the results of functions; their errors are raised after delivery."""
        logged: list[LoggedMetrics] = []
        for kept, copies, now, step in noted:
            if not callable(kept):
                logged.append((kept, copies, now, cast("int | None", step)))
                continue
            try:
                metrics = kept(now, *copies)
            except BaseException as error:  # a KeyboardInterrupt is raised after delivery, too
                name = getattr(kept, "__qualname__", type(kept).__qualname__)
                batch = None if now is None else now.num_batches
                error.add_note(f"It was raised by {name}, which computes what was logged at batch {batch}.")
                rest.callback(_raise, error)
                continue
            if metrics:
                logged.append((*_as_of_now(metrics, self._copies), now, None))
        return logged


def _latest(noted: Sequence[_Noted]) -> Sequence[_Noted]:
    """Leave out functions whose numbers were replaced later."""
    kept: list[_Noted] = []
    keys: set[Hashable] = set()
    for entry in reversed(noted):
        key = entry[3] if callable(entry[0]) else None
        if key is None or key not in keys:
            kept.append(entry)
            keys.add(key)
    return kept[::-1]


def _as_of_now(metrics: dict[str, Any], copies: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    if _are_unchanging(map(type, metrics.values())):  # the common case, without a copy of each value
        return (same := dict(metrics)), same
    return as_of_now(metrics, copies)


def _raise(error: BaseException) -> None:
    raise error


def _hand_to(place: BufferedDestination, logged: Sequence[LoggedMetrics]) -> None:
    try:
        place.take_metrics(logged)
    except Exception as error:
        # The engine adds a note with the running hook, which may only have triggered the delivery.
        now = logged[-1][2]
        error.add_note(
            f"The destination {type(place).__name__} raised it while it received metrics that were logged up to batch "
            f"{None if now is None else now.num_batches}. A hook that is named below may only have requested them."
        )
        raise


def takes_late(place: object) -> TypeGuard[BufferedDestination]:
    """Return whether a destination receives metrics late: it supports that, and `log_metrics` is not overridden."""
    return (
        isinstance(place, BufferedDestination)
        and type(place).log_metrics is BufferedDestination.log_metrics
        and "log_metrics" not in vars(place)
    )


def format_log_data_value(data: Any) -> str:
    """Format a logged value as text.

    Args:
        data: Text is quoted, a float gets four decimals, a tensor with one element is formatted as that element and any
            other, or one on the `meta` device, as its shape. Mappings and other iterables are formatted recursively.

    Raises:
        TypeError: If a mapping has a key that is not a string.

    Example:
        >>> format_log_data_value({"loss": 0.70341, "names": ["a", "b"]})
        '{ "loss": 0.7034, "names": ["a", "b"], }'
    """
    if data is None:
        return "None"
    if isinstance(data, str):
        return f'"{data}"'
    if isinstance(data, int):
        return str(data)
    if isinstance(data, float):
        return f"{data:.4f}"
    if is_tensor(data):
        has_number = data.numel() == 1 and not data.is_meta
        return format_log_data_value(data.cpu().item()) if has_number else f"Tensor of shape {data.shape}"
    if isinstance(data, Mapping):
        named = cast("Mapping[Any, Any]", data)
        for key in named:
            if not isinstance(key, str):
                raise TypeError(
                    f"The key {key!r} of a logged mapping is a {type(key).__name__}; names of logged values are "
                    f"strings. Write {str(key)!r}."
                )
        entries = (f'"{key}": {format_log_data_value(value)}, ' for key, value in named.items())
        return f"{{ {''.join(entries)}}}"
    # An array without dimensions has `__iter__`, which raises.
    if isinstance(data, Iterable) and getattr(cast(Any, data), "ndim", 1) != 0:
        items = cast("Iterable[Any]", data)
        return f"[{', '.join(map(format_log_data_value, items))}]"
    return str(cast(object, data))
