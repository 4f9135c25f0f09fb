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


@pytest.fixture
def written(logger):
    """Wait until what was logged is with Neptune, and return the run."""

    def wait(engine):
        logger.fit_end(engine.state, engine.logger)
        return logger.neptune_run

    return wait


def test_the_names_under_which_a_run_is_found(begun, logger, written):
    engine = begun(logger)
    engine.logger.log_hyperparameters({"lr": 0.25, "nested": {"a": 1}})
    engine.logger.log_metrics({"metrics/train/Accuracy": torch.tensor(0.5)}, step=1)
    engine.logger.log_traces({"algorithm_traces/EMA": 1})
    run = written(engine)
    assert run["training/rank"].fetch() == 0
    assert run["sys/name"].fetch() == "plum"
    assert run["source_code/integrations/neptune-MosaicML"].fetch()
    assert run["training/hyperparameters/lr"].fetch() == 0.25
    assert run["training/hyperparameters/nested/a"].fetch() == 1
    assert run["training/metrics/metrics/train/Accuracy"].fetch_last() == 0.5
    assert run["training/traces/algorithm_traces/EMA"].fetch() == 1


def test_a_step_that_is_not_later_is_left_out(begun, logger, written):
    engine = begun(logger)
    for step, value in ((1, 10.0), (2, 20.0), (2, 30.0), (1, 40.0)):
        engine.logger.log_metrics({"loss": value}, step=step)
    assert written(engine)["training/metrics/loss"].fetch_last() == 20.0


def test_files_are_kept_where_that_is_asked_for(begun, tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(b"weights")
    (tmp_path / "latest.pt").symlink_to(path)
    logger = NeptuneLogger(mode="debug", upload_checkpoints=True)
    engine = begun(logger)
    engine.logger.upload_file("models/ep1.pt", path)
    engine.logger.upload_file("models/latest.pt", tmp_path / "latest.pt")
    engine.logger.upload_file("models/latest.pt.symlink", path)
    logger.fit_end(engine.state, engine.logger)
    assert logger.neptune_run.exists("training/models/ep1.pt")
    assert not logger.neptune_run.exists("training/models/latest.pt")
    assert logger.can_upload_files()
    assert not NeptuneLogger(mode="debug").can_upload_files()
    with pytest.raises(FileNotFoundError, match=r"Neptune has no file 'models/ep2.pt' under 'training'"):
        logger.download_file("models/ep2.pt", "here.pt")


def test_a_namespace_without_a_name_is_refused():
    with pytest.raises(ValueError, match="base_namespace='' must not be empty"):
        NeptuneLogger(mode="debug", base_namespace="")
