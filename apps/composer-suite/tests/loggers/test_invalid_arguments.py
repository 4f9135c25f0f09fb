"""An argument of the wrong kind is an error that names it, when the logger is made."""

import inspect
import re
from importlib.util import find_spec

import pytest

from composer import loggers

LIBRARIES = {
    "CometMLLogger": "comet_ml",
    "ConsoleLogger": "composer",
    "FileLogger": "composer",
    "MLFlowLogger": "mlflow",
    "ProgressBarLogger": "composer",
    "SlackLogger": "slack_sdk",
    "TensorboardLogger": "tensorboard",
    "WandBLogger": "wandb",
}
NAMES = {("ConsoleLogger", "log_interval"): "console_log_interval"}  # what the Trainer calls it


class Thing:
    """What is no argument of anything."""

    def __repr__(self):
        return "<a thing>"


def wrong_arguments():
    for name, library in LIBRARIES.items():
        if find_spec(library) is None:
            continue
        for parameter in inspect.signature(getattr(loggers, name)).parameters.values():
            yield pytest.param(name, parameter.name, Thing(), id=f"{name}-{parameter.name}")
            if parameter.annotation is bool:
                yield pytest.param(name, parameter.name, "no", id=f"{name}-{parameter.name}-no")
            if parameter.annotation is int and parameter.name != "buffer_size":
                yield pytest.param(name, parameter.name, 1.5, id=f"{name}-{parameter.name}-1.5")


@pytest.mark.parametrize(("name", "argument", "value"), list(wrong_arguments()))
def test_an_argument_of_the_wrong_kind_is_named_when_the_logger_is_made(name, argument, value):
    said = NAMES.get((name, argument), argument)
    with pytest.raises((TypeError, ValueError), match=re.escape(f"{said}={value!r} ")):
        getattr(loggers, name)(**{argument: value})


@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs the library 'mlflow'")
def test_letters_of_a_text_are_no_patterns():
    # One of them is a star, which would have nothing logged.
    with pytest.raises(TypeError, match=r"ignore_metrics='time/\*' must be a list of texts, such as \['time/\*'\]"):
        loggers.MLFlowLogger(ignore_metrics="time/*")


@pytest.mark.skipif(find_spec("slack_sdk") is None, reason="needs the library 'slack_sdk'")
def test_a_pattern_that_is_no_regular_expression_is_named():
    with pytest.raises(
        ValueError, match=r"include_keys=\['loss', '\(metrics'\] has '\(metrics', which is not a regular"
    ):
        loggers.SlackLogger(["loss", "(metrics"])
