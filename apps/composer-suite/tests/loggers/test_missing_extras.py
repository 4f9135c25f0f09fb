"""A logger whose library is missing says which extra brings it; those of dead services say what to take instead."""

import sys

import pytest

from composer import loggers
from composer.utils import MissingConditionalImportError

EXTRAS = {
    "CometMLLogger": ("comet_ml", "comet"),
    "MLFlowLogger": ("mlflow", "mlflow"),
    "NeptuneLogger": ("neptune", "neptune"),
    "SlackLogger": ("slack_sdk", "slack"),
    "TensorboardLogger": ("tensorboard", "tensorboard"),
    "WandBLogger": ("wandb", "wandb"),
}


@pytest.mark.parametrize("name", EXTRAS)
def test_a_logger_whose_library_is_missing_names_the_extra(name, monkeypatch):
    module, extra = EXTRAS[name]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingConditionalImportError, match=rf"pip install 'composer-suite\[{extra}\]'"):
        getattr(loggers, name)()


def test_a_logger_of_a_dead_service_names_living_ones():
    with pytest.raises(RuntimeError, match=r"MosaicMLLogger.*no release since 2025.*MLFlowLogger.*WandBLogger"):
        loggers.MosaicMLLogger(log_interval=60)
