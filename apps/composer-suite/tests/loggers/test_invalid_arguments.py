"""Arguments that would fail only in a later step, replace files or log nothing are errors that name the argument."""

import re
from importlib.util import find_spec

import pytest

from composer import loggers


@pytest.mark.parametrize(
    ("name", "library", "argument", "value"),
    [
        ("ConsoleLogger", "composer", "log_interval", "5sp"),
        ("ConsoleLogger", "composer", "stream", "stdlog"),
        ("FileLogger", "composer", "flush_interval", 1.5),
        ("FileLogger", "composer", "overwrite", "no"),
        ("MLFlowLogger", "mlflow", "flush_interval", 0),
        ("MLFlowLogger", "mlflow", "logging_buffer_seconds", -1),
        ("MLFlowLogger", "mlflow", "resume", "no"),
        ("SlackLogger", "slack_sdk", "max_logs_per_message", 0),
        ("TensorboardLogger", "tensorboard", "flush_interval", 1.5),
        ("WandBLogger", "wandb", "patience_s", "long"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named_when_the_logger_is_made(name, library, argument, value):
    if find_spec(library) is None:
        pytest.skip(f"needs {library}")
    with pytest.raises((TypeError, ValueError), match=re.escape(repr(value))):
        getattr(loggers, name)(**{argument: value})


@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs the library 'mlflow'")
def test_letters_of_a_text_are_no_patterns():
    # One of them is a star, which would have nothing logged.
    with pytest.raises(TypeError, match=r"ignore_metrics='time/\*' must be a list of texts, such as \['time/\*'\]"):
        loggers.MLFlowLogger(ignore_metrics="time/*")
