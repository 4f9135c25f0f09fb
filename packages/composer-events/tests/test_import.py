"""What importing the package costs and changes, and what it offers."""

import subprocess
import sys

import pytest

import composer_events

PUBLIC = [
    "Event",
    "Engine",
    "Trace",
    "Traces",
    "Explanation",
    "Turn",
    "AlgorithmPass",
    "Algorithm",
    "Callback",
    "Serializable",
    "State",
    "ParallelismType",
    "DataSpec",
    "default_split_batch",
    "ensure_data_spec",
    "Evaluator",
    "ensure_evaluator",
    "create_interval_scheduler",
    "evaluate_periodically",
    "Logger",
    "log_lazily",
    "LoggerDestination",
    "BufferedDestination",
    "LoggedMetrics",
    "format_log_data_value",
    "format_name_with_dist",
    "format_name_with_dist_and_time",
    "partial_format",
    "extract_hparams",
    "convert_nested_dict_to_flat_dict",
    "convert_flat_dict_to_nested_dict",
    "ProfilerAction",
    "batch_get",
    "batch_set",
    "IteratorFileStream",
    "ensure_tuple",
    "iterate_with_callback",
    "map_collection",
    "Batch",
    "BreakEpochException",
    "JSON",
    "MemoryFormat",
    "TrainerMode",
    "NoEffectWarning",
    "NotIntendedUseWarning",
    "VersionedDeprecationWarning",
    "__version__",
]

LIGHT = """
import atexit, logging, signal, sys, threading  # logging itself asks to be called at the interpreter's exit

def look():
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    return *handlers, atexit._ncallbacks(), threading.active_count()

before = look()
import composer_events
assert "composer_events.engine" not in sys.modules
from composer_events import *
import composer_events.passes, composer_events.types
assert look() == before, (before, look())
heavy = {"torch", "numpy", "composer_dist"} & set(sys.modules)
assert not heavy, heavy
"""


def test_importing_every_name_loads_nothing_heavy_and_changes_nothing():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_public_names_are_these():
    assert sorted(composer_events.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_there_and_listed(name):
    assert getattr(composer_events, name) is not None
    assert name in dir(composer_events)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'composer_events' has no attribute 'Trainer'"):
        _ = composer_events.Trainer
