"""Offline experiments of Comet, read back from the archive that `comet upload` would send."""

import json
import socket
import zipfile
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from composer.loggers import CometMLLogger, InMemoryLogger

pytestmark = pytest.mark.skipif(find_spec("comet_ml") is None, reason="needs the extra 'comet'")

OFFLINE = {
    "online": False,
    "log_env_details": False,
    "log_git_metadata": False,
    "log_git_patch": False,
    "auto_output_logging": False,
}


class Archive:
    def __init__(self, path):
        with zipfile.ZipFile(path) as archive:
            self.files = {name: archive.read(name) for name in archive.namelist()}
        lines = self.files["messages.json"].decode().splitlines()
        self.messages = [json.loads(line) for line in lines]

    def of(self, kind):
        return [message["payload"] for message in self.messages if message["type"] == kind]

    def points(self, name):
        metrics = [payload["metric"] for payload in self.of("metric_msg")]
        return [(m["step"], m["metricValue"]) for m in metrics if m["metricName"] == name]

    def uploads(self, kind):
        return [payload for payload in self.of("file_upload") if payload["upload_type"] == kind]


@pytest.fixture
def archive(tmp_path):
    def read():
        (path,) = tmp_path.glob("*.zip")
        return Archive(path)

    return read


def test_the_points_of_a_training_are_those_that_were_logged(make_trainer, archive):
    memory = InMemoryLogger()
    trainer = make_trainer(max_duration="3ba", loggers=[CometMLLogger(exp_kwargs=OFFLINE), memory], run_name="plum")
    trainer.fit()
    trainer.close()
    found = archive().points("loss/train/total")
    expected = [(int(stamp.batch), float(value)) for stamp, value in memory.data["loss/train/total"]]
    assert [step for step, _ in found] == [step for step, _ in expected]
    np.testing.assert_allclose([float(value) for _, value in found], [value for _, value in expected], rtol=1e-6)


def test_the_settings_and_the_name(make_trainer, archive):
    logger = CometMLLogger(exp_kwargs=OFFLINE)
    trainer = make_trainer(max_duration="1ba", loggers=logger, run_name="plum")
    trainer.fit()
    trainer.close()
    others = {payload["key"]: payload["value"] for payload in archive().of("log_other")}
    assert (others["Created from"], others["Name"]) == ("mosaicml-composer", "plum")
    settings = {p["param"]["paramName"]: p["param"]["paramValue"] for p in archive().of("parameter_msg")}
    assert str(settings["rank_zero_seed"]) == "3"
    assert logger.name == "plum"


def test_a_table_is_a_file_of_json(begun, archive):
    engine = begun(CometMLLogger(exp_kwargs=OFFLINE))
    engine.logger.log_table(["a", "b"], [[1, "x"]], name="mine")
    engine.close()
    (upload,) = [u for u in archive().of("file_upload") if u["additional_params"].get("fileName") == "mine.json"]
    table = next(data for name, data in archive().files.items() if upload["file_path"].endswith(name))
    assert json.loads(table) == {"columns": ["a", "b"], "data": [[1, "x"]]}


@pytest.mark.parametrize("num_masks", [0, 1, 2])
def test_each_image_is_a_file_and_each_of_its_masks_are_two(begun, archive, num_masks):
    masks = {f"mask{number}": torch.randint(0, 3, (4, 8, 8)) for number in range(num_masks)}
    kept = {name: mask.clone() for name, mask in masks.items()}
    engine = begun(CometMLLogger(exp_kwargs=OFFLINE))
    engine.logger.log_images(torch.rand(4, 3, 8, 8), name="mine", masks=masks)
    engine.close()
    uploads = archive().uploads("visualization")
    assert len(uploads) == 4 * (1 + 2 * num_masks)
    names = {upload["additional_params"]["figName"] for upload in uploads}
    assert {f"mine_{index}" for index in range(4)} <= names
    if num_masks:
        assert {"mine_0 + mask0 mask overlaid", "mask0_0 mask"} <= names
    assert masks.keys() == kept.keys()
    assert all(torch.equal(masks[name], kept[name]) for name in masks)


def test_a_mask_that_is_no_mask(begun):
    engine = begun(CometMLLogger(exp_kwargs=OFFLINE))
    with pytest.raises(ValueError, match=r"masks\['mine'\] has a mask of shape \(3, 8, 8\)"):
        engine.logger.log_images(torch.rand(1, 3, 8, 8), masks={"mine": torch.zeros(1, 3, 8, 8)})


def test_a_comet_that_never_answers_costs_one_warning_and_no_step(make_trainer, monkeypatch):
    def train():
        logger = CometMLLogger(patience_s=0.5, exp_kwargs={"log_env_details": False})
        trainer = make_trainer(max_duration="2ba", loggers=logger)
        trainer.fit()
        trainer.close()
        return logger, trainer

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("COMET_URL_OVERRIDE", f"http://127.0.0.1:{silent.getsockname()[1]}/clientlib/")
        monkeypatch.setenv("COMET_API_KEY", "k" * 25)
        with pytest.warns(RuntimeWarning, match="CometMLLogger has not answered within 0.5 s. Training") as warned:
            logger, trainer = train()
    assert [warning.category for warning in warned] == [RuntimeWarning]
    assert trainer.state.timestamp.batch == 2
    assert logger.experiment is None


def test_a_logger_that_begins_again_has_an_experiment_of_its_own_for_each_run(begun, tmp_path):
    logger = CometMLLogger(exp_kwargs=OFFLINE)
    for value in (1.0, 2.0):
        engine = begun(logger)
        engine.logger.log_metrics({"value": value}, step=0)
        engine.close()
    points = sorted(Archive(path).points("value") for path in tmp_path.glob("*.zip"))
    assert [[(step, float(value)) for step, value in each] for each in points] == [[(0, 1.0)], [(0, 2.0)]]
