"""An argument of the wrong kind is an error that names it, when the profiler or one of its parts is made."""

import inspect
import re

import pytest

from composer import profiler
from composer.report import RunRecorder

MADE = {
    "EventRecorder": (profiler.EventRecorder, {}),
    "JSONTraceHandler": (profiler.JSONTraceHandler, {}),
    "Profiler": (profiler.Profiler, {"schedule": profiler.cyclic_schedule(), "trace_handlers": []}),
    "RunRecorder": (RunRecorder, {}),
    "SystemProfiler": (profiler.SystemProfiler, {}),
    "TorchProfiler": (profiler.TorchProfiler, {}),
    "cyclic_schedule": (profiler.cyclic_schedule, {}),
}
PREFIXES = ("torch_prof_", "sys_prof_")  # arguments of the Profiler that are those of its parts


class Thing:
    """What is no argument of anything."""

    def __repr__(self):
        return "<a thing>"


def wrong_arguments():
    for name, (kind, _) in MADE.items():
        for parameter in inspect.signature(kind).parameters.values():
            yield pytest.param(name, parameter.name, Thing(), id=f"{name}-{parameter.name}")
            if parameter.annotation == "bool":
                yield pytest.param(name, parameter.name, "no", id=f"{name}-{parameter.name}-no")
            if parameter.annotation == "int":
                yield pytest.param(name, parameter.name, 1.5, id=f"{name}-{parameter.name}-1.5")


@pytest.mark.parametrize(("name", "argument", "value"), list(wrong_arguments()))
def test_an_argument_of_the_wrong_kind_is_named_when_it_is_given(name, argument, value):
    kind, needed = MADE[name]
    for prefix in PREFIXES:
        said = argument.removeprefix(prefix) if name == "Profiler" else argument
        if said != argument:
            break
    with pytest.raises((TypeError, ValueError), match=rf"{said}(=| holds ){re.escape(repr(value))}"):
        kind(**needed | {argument: value})


def test_a_class_in_place_of_a_handler_is_refused():
    with pytest.raises(TypeError, match=r"trace_handlers holds .*EventRecorder.*Call it: EventRecorder\(\)"):
        profiler.Profiler(profiler.cyclic_schedule(), profiler.EventRecorder)
