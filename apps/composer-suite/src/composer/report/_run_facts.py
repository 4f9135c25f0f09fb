"""Facts about a run: its environment, settings, checkpoints, traces and profiler times."""

from __future__ import annotations

import inspect
import math
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch

from composer import _version
from composer_dist import get_world_size
from composer_time import Time

if TYPE_CHECKING:
    from composer_events.state import State

__all__ = ["fit_settings", "typed_settings", "environment", "profiler_times", "saved_checkpoints", "saved_traces"]


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
