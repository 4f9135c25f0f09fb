"""Where the time of a training goes: events, algorithms, callbacks, torch's operators, the machine's load."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer.profiler.event_recorder import EventRecorder as EventRecorder
    from composer.profiler.json_trace_handler import JSONTraceHandler as JSONTraceHandler
    from composer.profiler.marker import Marker as Marker
    from composer.profiler.profiler import Profiler as Profiler
    from composer.profiler.profiler_schedule import cyclic_schedule as cyclic_schedule
    from composer.profiler.system_profiler import SystemProfiler as SystemProfiler
    from composer.profiler.torch_profiler import TorchProfiler as TorchProfiler
    from composer.profiler.trace_handler import TraceHandler as TraceHandler
    from composer_events.event import ProfilerAction as ProfilerAction

__all__ = [
    "EventRecorder",
    "JSONTraceHandler",
    "Marker",
    "Profiler",
    "ProfilerAction",
    "SystemProfiler",
    "TorchProfiler",
    "TraceHandler",
    "cyclic_schedule",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer.profiler.event_recorder": ["EventRecorder"],
        "composer.profiler.json_trace_handler": ["JSONTraceHandler"],
        "composer.profiler.marker": ["Marker"],
        "composer.profiler.profiler": ["Profiler"],
        "composer.profiler.profiler_schedule": ["cyclic_schedule"],
        "composer.profiler.system_profiler": ["SystemProfiler"],
        "composer.profiler.torch_profiler": ["TorchProfiler"],
        "composer.profiler.trace_handler": ["TraceHandler"],
        "composer_events.event": ["ProfilerAction"],
    },
)
