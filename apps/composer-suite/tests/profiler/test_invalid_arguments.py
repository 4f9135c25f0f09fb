"""Numbers and flags that would fail only in a later step, or replace files, are errors that name the argument."""

import re

import pytest

from composer import profiler
from composer.report import RunRecorder


@pytest.mark.parametrize(
    ("make", "argument", "value"),
    [
        (profiler.EventRecorder, "num_spans", 1.5),
        (profiler.JSONTraceHandler, "num_traces_to_keep", 1.5),
        (profiler.JSONTraceHandler, "overwrite", "no"),
        (profiler.SystemProfiler, "stats_thread_interval_seconds", "often"),
        (profiler.TorchProfiler, "num_traces_to_keep", -2),
        (profiler.TorchProfiler, "overwrite", "no"),
        (profiler.cyclic_schedule, "active", 0),
        (profiler.cyclic_schedule, "wait", 1.5),
        (RunRecorder, "flush_interval", 0),
        (RunRecorder, "overwrite", "no"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named_when_it_is_given(make, argument, value):
    with pytest.raises((TypeError, ValueError), match=re.escape(f"{argument}={value!r} ")):
        make(**{argument: value})
