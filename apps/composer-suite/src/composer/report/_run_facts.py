"""Facts about a run: its environment, settings, files and profiler times, and the activity of algorithms."""

from __future__ import annotations

import inspect
import math
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from numbers import Integral, Real
from typing import Any, Final, TypeVar, cast

import torch

from composer import _version
from composer_dist import get_world_size
from composer_events.event import Event
from composer_events.state import State
from composer_time import Time


def saved_checkpoints(state: State) -> list[str]:
    """Return the paths or URIs of this run's checkpoints."""
    places: list[str] = []
    for callback in state.callbacks:
        # By attribute, because the saver's module is slow to import and may not be needed.
        for path in getattr(callback, "saved_checkpoints", ()):
            places.append(path if getattr(callback, "remote_uploader", None) is not None else os.path.abspath(path))
    return places


def saved_traces(state: State) -> list[str]:
    """Return the paths of the traces that this run's profiler has written and kept."""
    paths: list[str] = []
    for callback in state.callbacks:
        merged = getattr(callback, "merged_trace", None)
        paths += [*getattr(callback, "saved_traces", ()), *([] if merged is None else [merged])]
    return [os.path.abspath(path) for path in paths]


def environment(state: State) -> dict[str, Any]:
    """Return the versions, the device and the command of the run."""
    return {
        "composer": _version.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.platform(),
        "device": state.device.name,
        "world_size": get_world_size(),
        "command": sys.argv,
    }


def profiler_times(state: State) -> list[dict[str, Any]]:
    """Return the durations from the recorders of a profiler, if there are any."""
    # By attribute, because few runs are profiled, and the recorder's module imports those of all traces.
    handlers: list[Any] = getattr(state.profiler, "trace_handlers", [])
    return [
        {
            "name": time.name,
            "count": time.count,
            "total_s": time.total_ns / 1e9,
            "median_s": time.quantile_ns(0.5) / 1e9,
            "p95_s": time.quantile_ns(0.95) / 1e9,
            "longest_s": time.longest_ns / 1e9,
            "share_of_steps": shares.get(time.name),
        }
        for handler in handlers
        if hasattr(handler, "shares_of_steps")
        for shares in (handler.shares_of_steps(),)
        for time in handler.times.values()
    ]


T = TypeVar("T")

_LEFT_OUT: Final = object()  # not a plain value, so `_plain_items` drops it
_LONGEST: Final = 100  # items; a longer tuple is data, not a setting
_DEEPEST: Final = 3  # nested lists; this also ends lists that contain themselves
_MOST_BITS: Final = 1024  # larger integers exceed the limits of JSON readers and of Python's own conversion
_WEIGHTS: Final = frozenset({"params", "param_names"})


def typed_settings(state: State) -> dict[str, Any]:
    """Return the settings of the optimizers and the algorithms, by names such as `optimizer/lr`.

    Call it before training, when schedulers and checkpoints have not yet changed the settings of the script. Values
    that are not plain, or are on a device and would require synchronization, are left out.
    """
    found: dict[str, Any] = {}
    for name, optimizer in _numbered(("optimizer", each) for each in _attribute(state, "optimizers")):
        found |= {name: type(optimizer).__name__, **_settings_of_groups(name, optimizer)}
    algorithms = ((type(each).__name__, each) for each in _attribute(state, "algorithms"))
    for name, algorithm in _numbered(algorithms):
        found |= _below(f"algorithms/{name}", _plain_items(_or(_arguments, {}, algorithm)))
    return found


def fit_settings(state: State) -> dict[str, Any]:
    """Return the settings of a call of `fit`: the dataloader's batch size per rank, the duration, the precision."""
    settings = {"train_dataloader/batch_size": _or(_batch_size, _LEFT_OUT, state)}
    settings |= {name: getattr(state, name, _LEFT_OUT) for name in ("max_duration", "precision")}
    return _plain_items(settings)


def _or(function: Callable[[Any], T], otherwise: T, argument: Any) -> T:
    """Call a function on a foreign object, which may raise anything; return `otherwise` if it does."""
    try:
        return function(argument)
    except Exception:
        return otherwise


def _attribute(state: State, name: str) -> list[Any]:
    return _or(lambda state: list(getattr(state, name)), [], state)


def _numbered(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Number repeated names."""
    counts: Counter[str] = Counter()
    for name, value in named:
        counts[name] += 1
        yield (name if counts[name] == 1 else f"{name}-{counts[name]}"), value


def _settings_of_groups(name: str, optimizer: Any) -> dict[str, Any]:
    """Return the settings that all parameter groups share, and the rest for each group."""
    groups = _or(lambda optimizer: [_plain_items(group, _WEIGHTS) for group in optimizer.param_groups], [], optimizer)
    if not groups:
        return {}
    common = {
        key: value for key, value in groups[0].items() if all(key in group and group[key] == value for group in groups)
    }
    found = _below(name, common)
    for number, group in enumerate(groups):
        own = {key: value for key, value in group.items() if key not in common}
        found |= _below(f"{name}/group{number}", own)
    return found


def _below(prefix: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}/{name}": value for name, value in settings.items()}


def _arguments(algorithm: Any) -> dict[str, Any]:
    """Return the attributes with the names of the constructor's parameters.

    Other public attributes may change with each batch, such as the mixing weight of MixUp. They are included only if a
    parameter has no attribute of its name, since one of them probably holds its value. Properties are not read.
    """
    kept: dict[str, Any] = vars(algorithm)  # without properties, whose code could synchronize
    parameters = inspect.signature(type(algorithm)).parameters.values()
    names = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    # The public attribute comes last, so it takes precedence.
    found = {name: kept[key] for name in names for key in (f"_{name}", name) if key in kept}
    if len(found) == len(names) and names:
        return found
    return found | {name: value for name, value in kept.items() if not name.startswith("_")}


def _batch_size(state: Any) -> Any:
    loader = state.train_dataloader
    size = getattr(loader, "batch_size", None)
    # A DataLoader with a custom batch sampler has `batch_size=None`.
    return loader.batch_sampler.batch_size if size is None else size


def _plain_items(settings: Mapping[Any, Any], without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the plain entries, converted for JSON."""
    plain: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(name, str) and name not in without:
            with suppress(Exception):  # a foreign object may raise anything
                plain[name] = _plain(value)
    return plain


def _plain(value: Any, depth: int = 0) -> Any:
    """Convert a value for JSON; raise an exception if it is not plain."""
    if isinstance(value, Enum):  # first, because a member may also be a string or a number
        return _plain(value.value, depth)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Time):
        return str(cast("Time[Any]", value))
    # By exact type: subclasses, such as DTensor, may need a collective to read.
    if type(value) in (torch.Tensor, torch.nn.Parameter) and (value.device.type, value.ndim) == ("cpu", 0):
        return _plain(value.item())
    if isinstance(value, Integral) and int(value).bit_length() <= _MOST_BITS:
        return int(value)
    if isinstance(value, Real):  # NumPy's among them
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, (tuple, list)) and len(cast("list[Any]", value)) <= _LONGEST and depth < _DEEPEST:
        return [_plain(item, depth + 1) for item in cast("list[Any]", value)]
    raise TypeError(f"a {type(value).__name__} is not plain")  # no repr: it may read a device


_MOST_RANGES = 500  # per algorithm and event, more than a screen can show


class Acting:
    """Ranges of batches in which each algorithm has acted, by event.

    Consecutive batches form one range. If there are too many ranges, those with small gaps between them are merged.

    Example:
        >>> acting = Acting()
        >>> for batch in (0, 1, 2, 7):
        ...     acting.add("MixUp on before_forward", batch)
        >>> acting.as_dict()
        {'MixUp on before_forward': {'count': 4, 'batches': [[0, 2], [7, 7]]}}
    """

    def __init__(self) -> None:
        self._ranges: dict[str, list[list[int]]] = {}
        self._counts: dict[str, int] = {}
        self._gaps: dict[str, int] = {}

    def restore(self, acting: Mapping[str, Any]) -> None:
        """Continue from the `as_dict` of an earlier part of the run."""
        self._ranges = {name: [list(batches) for batches in acted["batches"]] for name, acted in acting.items()}
        self._counts = {name: acted["count"] for name, acted in acting.items()}

    def add(self, name: str, batch: int) -> None:
        """Add a batch in which `name` has acted."""
        ranges = self._ranges.setdefault(name, [])
        self._counts[name] = self._counts.get(name, 0) + 1
        gap = self._gaps.setdefault(name, 1)
        # A smaller batch number, as after loading a checkpoint, starts another range.
        if ranges and 0 <= batch - ranges[-1][1] <= gap:
            ranges[-1][1] = batch
            return
        ranges.append([batch, batch])
        while len(ranges) > _MOST_RANGES:  # the gap doubles, so this happens rarely in a long run
            self._gaps[name] = gap = 2 * gap
            ranges[:] = _joined(ranges, gap)

    def as_dict(self) -> dict[str, dict[str, object]]:
        """Return, by name, the number of batches and the ranges, each with its first and last batch."""
        return {name: {"count": self._counts[name], "batches": ranges} for name, ranges in self._ranges.items()}


def _joined(ranges: Iterable[list[int]], gap: int) -> list[list[int]]:
    joined: list[list[int]] = []
    for first, last in ranges:
        if joined and 0 <= first - joined[-1][1] <= gap:
            joined[-1][1] = last
        else:
            joined.append([first, last])
    return joined


# The part of a step that ends with an event. The recorder is called last, so a part includes the algorithms and
# callbacks of that event, as the page explains.
_ENDS: Final = {
    Event.BATCH_START: "waiting for data",
    Event.BEFORE_FORWARD: "preparing the batch",
    Event.AFTER_FORWARD: "forward",
    Event.AFTER_LOSS: "loss",
    Event.AFTER_BACKWARD: "backward",
    Event.AFTER_TRAIN_BATCH: "after backward",
    Event.BATCH_END: "optimizer's step and callbacks",
    Event.EVAL_AFTER_ALL: "evaluation",
    Event.BATCH_CHECKPOINT: "checkpoints",
    Event.EPOCH_CHECKPOINT: "checkpoints",
}
_BEGINS: Final = frozenset({Event.FIT_START, Event.EPOCH_START, Event.EPOCH_END, Event.EVAL_BEFORE_ALL})


class StepTime:
    """Total duration of each part of a step, measured on the host.

    Devices work asynchronously, so their time appears in the part in which the host synchronizes.

    Attributes:
        seconds: The total of each part so far.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(_ENDS.values(), 0.0)
        self._since: float | None = None

    def see(self, event: Event) -> None:
        """Add the time since the last event to the part that ends with this one."""
        part = _ENDS.get(event)
        if part is None and event not in _BEGINS:
            return
        now = time.perf_counter()
        # Events of `_BEGINS` end no part: the time before them, such as between epochs, is not counted.
        if part is not None and self._since is not None:
            self.seconds[part] += now - self._since
        self._since = now
