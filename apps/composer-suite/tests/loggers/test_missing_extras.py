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


@pytest.mark.parametrize("run_name", [None, "my-run"])
def test_the_logger_of_a_platform_does_nothing_elsewhere(monkeypatch, run_name):
    """A RuntimeError ended scripts that Composer ran."""
    monkeypatch.setitem(sys.modules, "mcli", None)
    if run_name is None:
        monkeypatch.delenv("RUN_NAME", raising=False)
    else:
        monkeypatch.setenv("RUN_NAME", run_name)
    with pytest.warns(UserWarning, match="MosaicMLLogger logs nothing: .*(RUN_NAME|pip install mosaicml-cli)"):
        logger = loggers.MosaicMLLogger(log_interval=60)
    logger.log_metrics({"loss": 1.0})
    assert logger.buffered_metadata == {}
