"""What a run can say about itself: what it runs on, what it has saved, what its profiler has measured."""

from __future__ import annotations

import os
import platform
import sys
from typing import TYPE_CHECKING, Any

import torch

from composer import _version
from composer_dist import get_world_size

if TYPE_CHECKING:
    from composer_events.state import State

__all__ = ["environment", "profiler_times", "saved_checkpoints", "saved_traces"]


def saved_checkpoints(state: State) -> list[str]:
    """Return where the checkpoints of this run are: paths, or addresses in a store."""
    places: list[str] = []
    for callback in state.callbacks:
        # By what it has, since the saver's own module takes long to load and may never be needed.
        for path in getattr(callback, "saved_checkpoints", ()):
            places.append(path if getattr(callback, "remote_uploader", None) is not None else os.path.abspath(path))
    return places


def saved_traces(state: State) -> list[str]:
    """Return where the traces of this run are that its profiler has written and not deleted since."""
    paths: list[str] = []
    for callback in state.callbacks:
        merged = getattr(callback, "merged_trace", None)
        paths += [*getattr(callback, "saved_traces", ()), *([] if merged is None else [merged])]
    return [os.path.abspath(path) for path in paths]


def environment(state: State) -> dict[str, Any]:
    """Return what the run runs on."""
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
    """Return what the recorders of a profiler have added up, if there are any."""
    # By what it has, since the recorder's own module loads that of all traces, and few runs are profiled.
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
