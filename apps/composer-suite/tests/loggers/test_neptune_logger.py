"""Neptune's client, which keeps runs in memory or in files of this machine."""

from importlib.util import find_spec

import pytest
import torch

from composer.loggers import NeptuneLogger

pytestmark = [
    pytest.mark.skipif(find_spec("neptune") is None, reason="needs the extra 'neptune'"),
    pytest.mark.filterwarnings(r"ignore:Info \(NVML\)"),
]


@pytest.fixture
def logger():
    return NeptuneLogger(mode="debug")


def test_the_names_under_which_a_run_is_found(begun, logger):
    engine = begun(logger)
    engine.logger.log_hyperparameters({"lr": 0.25, "nested": {"a": 1}})
    engine.logger.log_metrics({"metrics/train/Accuracy": torch.tensor(0.5)}, step=1)
    engine.logger.log_traces({"algorithm_traces/EMA": 1})
    logger._outbox.drain()
    run = logger.neptune_run
    assert run["training/rank"].fetch() == 0
    assert run["sys/name"].fetch() == "plum"
    assert run["source_code/integrations/neptune-MosaicML"].fetch()
    assert run["training/hyperparameters/lr"].fetch() == 0.25
    assert run["training/hyperparameters/nested/a"].fetch() == 1
    assert run["training/metrics/metrics/train/Accuracy"].fetch_last() == 0.5
    assert run["training/traces/algorithm_traces/EMA"].fetch() == 1
