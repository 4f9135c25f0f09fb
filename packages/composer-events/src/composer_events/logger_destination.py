"""What a place is that logged values and files go to."""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias, TypeGuard, cast
from weakref import WeakMethod

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
    """Take what a `Logger` hands on: a file, a console, a service.

    Every method does nothing until a subclass says otherwise, and the `Logger` calls only those that a subclass
    overrides. A destination is a callback too. On `Event.INIT` it acts before the other callbacks, so that they can
    log; on all other events after them, so that it can write down what they logged.

    Example:
        >>> class Remember(LoggerDestination):
        ...     def __init__(self):
        ...         self.metrics = {}
        ...     def log_metrics(self, metrics, step=None):
        ...         self.metrics.update(metrics)
    """

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Take the settings of the run.

        Args:
            hyperparameters: By name.
        """

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Take numbers measured at one step.

        Args:
            metrics: By name. Tensors may still be on their device.
            step: The count of batches that they belong to.
        """

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Take a table.

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
        """Take images.

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
        """Take notes on what the run did, such as which algorithms acted on which event.

        Args:
            traces: By name.
        """

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Take a file. The caller may change or delete it as soon as this returns.

        Args:
            state: The training state.
            remote_file_name: Name of the copy.
            file_path: Where the file is now.
            overwrite: Whether a file of that name may be replaced.
        """

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Bring back a file that was uploaded.

        Args:
            remote_file_name: Name of the copy.
            destination: Where to put it.
            overwrite: Whether a file at `destination` may be replaced.
            progress_bar: Whether to show how far it is.

        Raises:
            NotImplementedError: If the destination keeps no files.
        """
        raise NotImplementedError(
            f"{type(self).__name__} keeps no files, so {remote_file_name!r} cannot be downloaded from it. "
            f"Ask a destination whose `can_upload_files()` is True."
        )

    def can_upload_files(self) -> bool:
        """Answer whether files that are handed to `upload_file` are kept."""
        return False


UNCHANGING: Final = frozenset({bool, int, float, str, type(None)})
"""Types of values that need no copy."""


def detached_copy(value: Any) -> Any:
    """Return a copy of a value; that of a tensor stays on its device and keeps no graph alive.

    Args:
        value: A number, tensor, array, text, or a container of these. Anything else that cannot be copied, such as an
            open file, is returned as it is.
    """
    if type(value) in UNCHANGING:
        return value
    if is_tensor(value):
        return value.detach().clone() if value.requires_grad else value.clone()
    if isinstance(value, dict) or type(value) in (list, tuple):
        return map_values(detached_copy, value)
    try:
        return copy.deepcopy(value)
    except Exception:  # whatever somebody else's object raises
        return value


def kept_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as they are now; whatever lies on an accelerator stays there, and nobody waits for it.

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
    """Return metrics that keep no forward pass in memory, and copies of them as they are now.

    Args:
        metrics: By name.
        copies: Whether those are wanted, which are as of `kept_metrics`. Otherwise the same dict is returned twice.
    """
    torch: Any = sys.modules.get("torch")
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
    """Return what a value of `kept_metrics` was made from.

    Args:
        value: The value.
    """
    if type(value) is not _Scalar:
        return value
    number, dtype = value
    return sys.modules["torch"].tensor(number, dtype=dtype, device="cpu")


def map_values(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a container with its elements changed, or what is none changed itself.

    Args:
        change: What is done to each element.
        value: A dict, list or tuple, nested or not, or anything else.
    """
    if isinstance(value, dict):
        return {key: map_values(change, element) for key, element in cast("dict[Any, Any]", value).items()}
    if type(value) in (list, tuple):
        return type(value)(map_values(change, element) for element in value)
    return change(value)


class _Scalar(tuple[Any, Any]):
    """The number and the dtype of a tensor without axes."""

    __slots__ = ()


_MOST_KEPT: Final = 256  # calls; so that what nobody asks for does not grow
# Another thread that reads a destination hands over, too. One lock for all, since destinations are copied and pickled.
_HANDING_OVER: Final = RLock()
_are_unchanging: Final = UNCHANGING.issuperset

LoggedMetrics: TypeAlias = "tuple[dict[str, Any], dict[str, Any], Timestamp | None, int | None]"
"""What one call logged: the metrics as they were handed in; copies of them as they were then, for
`restored` to read, if a destination asks for copies, otherwise the same again; the time,
`None` where a destination was called by hand; and the step, where the caller gave one."""

_Noted: TypeAlias = "tuple[dict[str, Any] | Callable[..., dict[str, Any]], Any, Timestamp | None, int | None]"


class BufferedDestination(LoggerDestination):
    """Take metrics many calls at a time.

    A training step logs several times, to each destination, and what reads the values every so many batches or only
    at the end need not be called each time. Such a destination overrides `take_metrics`; the `Logger` notes what is
    logged, and hands it over when there is much of it or when the destination calls `catch_up`, which it does before it
    looks at what it has. One with another `log_metrics`, be it a subclass's or one that a test sets on it, is called
    each time, as any other. The engine has everything handed over before it closes a callback.

    Attributes:
        copies_values: Whether it needs values as they were when they were logged, though tensors may have changed.

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
    _buffers: tuple[MetricBuffer, ...] = ()  # of the loggers that write to it

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the loggers are told of another `log_metrics`, such as a test's."""
        if name != "log_metrics":
            super().__setattr__(name, value)
            return
        if value == BufferedDestination.log_metrics.__get__(self):  # as a test puts it back when it is over
            vars(self).pop(name, None)
        else:
            super().__setattr__(name, value)
        self._sort_anew()

    def __delattr__(self, name: str) -> None:
        """Delete an attribute; the loggers are told if it is `log_metrics`."""
        super().__delattr__(name)
        if name == "log_metrics":
            self._sort_anew()

    @abstractmethod
    def take_metrics(self, logged: Sequence[LoggedMetrics]) -> None:
        """Take what was logged since the last time.

        Args:
            logged: What each call logged, in order.
        """

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Take numbers measured at one step, at once.

        Args:
            metrics: By name.
            step: The count of batches that they belong to.
        """
        self.catch_up()
        copies = kept_metrics(metrics) if self.copies_values else metrics
        self.take_metrics([(metrics, copies, None, step)])

    def catch_up(self) -> None:
        """Have `take_metrics` called with what was logged and not yet handed over."""
        for buffer in self._buffers:
            buffer.deliver()

    def attach(self, buffer: MetricBuffer) -> None:
        """Remember whom to ask in `catch_up`; for a `Logger` to call."""
        if buffer not in self._buffers:
            self._buffers = (*self._buffers, buffer)

    def _sort_anew(self) -> None:
        for buffer in self._buffers:
            buffer.sort_anew()


class MetricBuffer:
    """What was logged and not yet handed to the destinations that take it late.

    Args:
        sort_anew: A method, called when a destination's `log_metrics` is replaced. It keeps nobody alive.

    Attributes:
        destinations: Those. Assigning others hands over to the old ones first.
    """

    def __init__(self, sort_anew: Callable[[], None]) -> None:
        self._sort_anew: WeakMethod[Callable[[], None]] | None = WeakMethod(sort_anew)
        # Of what is computed when it is handed over, the call stands in the place of the metrics.
        self._noted: list[_Noted] = []
        self._destinations: tuple[BufferedDestination, ...] = ()
        self._copies = False
        self._seen: Timestamp | None = None
        self._now: Timestamp | None = None  # a copy of the one seen, which loading a state changes in place
        self._batch = -1  # of the copy

    @property
    def destinations(self) -> tuple[BufferedDestination, ...]:
        """Who takes what is noted."""
        return self._destinations

    @destinations.setter
    def destinations(self, destinations: tuple[BufferedDestination, ...]) -> None:
        try:
            self.deliver()
        finally:  # an old one that fails does not keep out the new ones
            self._destinations = destinations
            self._copies = any(place.copies_values for place in destinations)
            for place in destinations:
                place.attach(self)

    def sort_anew(self) -> None:
        """Have the logger find out anew which of its destinations take metrics late."""
        sort = None if self._sort_anew is None else self._sort_anew()
        if sort is not None:
            sort()

    def note(self, metrics: dict[str, Any], timestamp: Timestamp, step: int | None) -> None:
        """Keep what one call logs until it is handed over.

        Args:
            metrics: By name.
            timestamp: The time in training.
            step: The count of batches, if the caller gave one.
        """
        if timestamp is not self._seen or timestamp.num_batches != self._batch:
            self._look_at(timestamp)
        self._noted.append((*_as_of_now(metrics, self._copies), self._now, step))
        if len(self._noted) >= _MOST_KEPT:
            self.deliver()

    def note_call(self, compute: Callable[..., dict[str, Any]], arguments: Sequence[Any], timestamp: Timestamp) -> None:
        """Keep a call whose result is to be logged, until it is handed over.

        Args:
            compute: Takes the timestamp and the arguments, and returns metrics by name, in a dict of their own.
            arguments: What it takes, which does not change any more.
            timestamp: The time in training.
        """
        if timestamp is not self._seen or timestamp.num_batches != self._batch:
            self._look_at(timestamp)
        self._noted.append((compute, arguments, self._now, None))
        if len(self._noted) >= _MOST_KEPT:
            self.deliver()

    def deliver(self) -> None:
        """Hand over what was noted, to all destinations."""
        if not self._noted:
            return
        with _HANDING_OVER, ExitStack() as rest:  # one that fails costs the others nothing
            noted = self._noted[:]
            del self._noted[: len(noted)]  # another thread may go on adding to the list
            if logged := self._computed(noted, rest):
                for place in reversed(self._destinations):
                    rest.callback(_hand_to, place, logged)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the logger, to which a copy does not belong: nobody copies a whole run with a destination."""
        return {**vars(self), "_sort_anew": None}

    def _look_at(self, timestamp: Timestamp) -> None:
        self._seen, self._now, self._batch = timestamp, timestamp.copy(), timestamp.num_batches

    def _computed(self, noted: Sequence[_Noted], rest: ExitStack) -> list[LoggedMetrics]:
        """Return what was noted with the results of calls; what one of them raises is raised at the end."""
        logged: list[LoggedMetrics] = []
        for kept, copies, now, step in noted:
            if not callable(kept):
                logged.append((kept, copies, now, step))
                continue
            try:
                metrics = kept(now, *copies)
            except BaseException as error:  # Ctrl-C, too, is raised once all have what is theirs
                name = getattr(kept, "__qualname__", type(kept).__qualname__)
                batch = None if now is None else now.num_batches
                error.add_note(f"It was raised by {name}, which computes what was logged at batch {batch}.")
                rest.callback(_raise, error)
                continue
            if metrics:
                logged.append((*_as_of_now(metrics, self._copies), now, step))
        return logged


def _as_of_now(metrics: dict[str, Any], copies: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    if _are_unchanging(map(type, metrics.values())):  # most are
        return (same := dict(metrics)), same
    return as_of_now(metrics, copies)


def _raise(error: BaseException) -> None:
    raise error


def _hand_to(place: BufferedDestination, logged: Sequence[LoggedMetrics]) -> None:
    try:
        place.take_metrics(logged)
    except Exception as error:
        # The engine adds next what was running: whatever had metrics handed over, often to all but itself.
        now = logged[-1][2]
        error.add_note(
            f"The destination {type(place).__name__} raised it while it took metrics that were logged up to batch "
            f"{None if now is None else now.num_batches}. What else is named here may only have asked for them."
        )
        raise


def takes_late(place: object) -> TypeGuard[BufferedDestination]:
    """Answer whether a destination takes metrics late: it is made for that, and nobody has put another way on it."""
    return (
        isinstance(place, BufferedDestination)
        and type(place).log_metrics is BufferedDestination.log_metrics
        and "log_metrics" not in vars(place)
    )


def format_log_data_value(data: Any) -> str:
    """Write a logged value as text.

    Args:
        data: Text is quoted, a float gets four decimals, a tensor with one element reads as that element and any
            other, or one on the `meta` device, as its shape. Mappings and other iterables are written element by
            element.

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
        return _format_mapping(cast("Mapping[Any, Any]", data))
    # An array without axes calls itself iterable and is not.
    if isinstance(data, Iterable) and getattr(cast(Any, data), "ndim", 1) != 0:
        items = cast("Iterable[Any]", data)
        return f"[{', '.join(map(format_log_data_value, items))}]"
    return str(cast(object, data))


def _format_mapping(data: Mapping[Any, Any]) -> str:
    for key in data:
        if not isinstance(key, str):
            raise TypeError(
                f"The key {key!r} of a logged mapping is a {type(key).__name__}; names of logged values are strings. "
                f"Write {str(key)!r}."
            )
    items = (f'"{key}": {format_log_data_value(value)}, ' for key, value in data.items())
    return f"{{ {''.join(items)}}}"


def is_tensor(data: Any) -> bool:
    """Answer whether a value is a tensor, without importing torch.

    Args:
        data: The value.
    """
    # Nothing is a tensor in a process that has not imported torch, and only to find that out it is too slow.
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.Tensor)
