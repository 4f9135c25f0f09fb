"""Event files, read back with TensorBoard's own reader."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from composer.core import Callback
from composer.loggers import InMemoryLogger, LoggerDestination, TensorboardLogger

pytestmark = pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs the extra 'tensorboard'")


@pytest.fixture
def read():
    """Read a folder of event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(folder):
        return EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()

    return read


def test_the_points_of_a_training_are_those_that_were_logged(make_trainer, make_loader, read, tmp_path):
    memory = InMemoryLogger()
    trainer = make_trainer(
        max_duration="2ep",
        eval_dataloader=make_loader(4, 2),
        loggers=[TensorboardLogger(log_dir=str(tmp_path / "tb")), memory],
        run_name="plum",
    )
    trainer.fit()
    trainer.close()
    events = read(tmp_path / "tb/plum")
    for name in ("loss/train/total", "metrics/eval/MulticlassAccuracy", "time/batch"):
        points = [(event.step, event.value) for event in events.Scalars(name)]
        expected = [(int(stamp.batch), float(value)) for stamp, value in memory.data[name]]
        assert [step for step, _ in points] == [step for step, _ in expected]
        np.testing.assert_allclose([value for _, value in points], [value for _, value in expected], rtol=1e-6)


def test_text_and_what_is_no_number_are_left_out(begun, read, tmp_path):
    engine = begun(TensorboardLogger(log_dir=str(tmp_path)))
    engine.logger.log_metrics({"text": "so", "several": torch.ones(3), "none": None, "one": np.float32(2)}, step=4)
    engine.close()
    events = read(tmp_path / "plum")
    assert events.Tags()["scalars"] == ["one"]
    assert events.Scalars("one")[0].step == 4


@pytest.mark.parametrize(
    ("images", "channels_last", "size"),
    [
        (torch.rand(4, 6), False, (4, 6)),
        (torch.rand(3, 4, 6), False, (4, 6)),
        (torch.rand(4, 6, 3), True, (4, 6)),
        (torch.rand(3, 4, 6, dtype=torch.bfloat16), False, (4, 6)),
        (np.random.rand(4, 6, 3), True, (4, 6)),
        (torch.randint(0, 256, (3, 4, 6)), False, (4, 6)),
        ([torch.rand(3, 4, 6)], False, (4, 6)),
    ],
)
def test_images_of_each_layout(begun, read, tmp_path, images, channels_last, size):
    engine = begun(TensorboardLogger(log_dir=str(tmp_path)))
    engine.logger.log_images(images, "mine", channels_last, step=7)
    engine.close()
    (image,) = read(tmp_path / "plum").Images("mine")
    assert (image.step, image.height, image.width) == (7, *size)


def test_several_images_are_all_there(begun, read, tmp_path):
    engine = begun(TensorboardLogger(log_dir=str(tmp_path)))
    engine.logger.log_images(torch.rand(5, 3, 8, 8), "alike")
    engine.logger.log_images([torch.rand(3, 8, 8), torch.rand(3, 4, 4)], "of_other_sizes")
    engine.close()
    events = read(tmp_path / "plum")
    assert sorted(events.Tags()["images"]) == ["alike", "of_other_sizes/0", "of_other_sizes/1"]


def test_the_settings_of_the_run_stand_beside_its_final_metrics(make_trainer, read, tmp_path):
    from tensorboard.plugins.hparams import metadata

    class LogSettings(Callback):
        def fit_start(self, state, logger):
            logger.log_hyperparameters({"lr": 0.25, "is_deep": True, "nested": {"name": "plum"}, "sizes": [1, 2]})

    trainer = make_trainer(
        max_duration="2ba", loggers=TensorboardLogger(log_dir=str(tmp_path)), callbacks=LogSettings(), run_name="plum"
    )
    trainer.fit()
    trainer.close()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["plum"]
    assert not [path for path in (tmp_path / "plum").iterdir() if path.is_dir()]
    events = read(tmp_path / "plum")
    plugin = events.SummaryMetadata("_hparams_/session_start_info").plugin_data
    settings = metadata.parse_session_start_info_plugin_data(plugin.content).hparams
    assert settings["lr"].number_value == 0.25
    assert settings["nested/name"].string_value == "plum"
    assert settings["sizes"].string_value == "[1, 2]"
    assert settings["rank_zero_seed"].number_value == 3
    (final,) = events.Scalars("hparams/loss/train/total")
    assert final.value == events.Scalars("loss/train/total")[-1].value


def test_each_flush_uploads_what_has_been_written(make_trainer, read, tmp_path):
    class Keeper(LoggerDestination):
        def upload_file(self, state, remote_file_name, file_path, *, overwrite):
            folder = tmp_path / "far" / remote_file_name
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.write_bytes(file_path.read_bytes())

    trainer = make_trainer(max_duration="4ba", loggers=[TensorboardLogger(flush_interval=1), Keeper()], run_name="plum")
    trainer.fit()
    trainer.close()
    uploaded = list((tmp_path / "far/tensorboard_logs/plum").iterdir())
    assert len(uploaded) >= 4
    assert all(path.name.endswith("-0") for path in uploaded)
    assert [event.step for event in read(tmp_path / "far/tensorboard_logs/plum").Scalars("loss/train/total")] == [
        0,
        1,
        2,
        3,
    ]


def test_without_a_place_for_files_a_run_has_one_file_of_points(make_trainer, tmp_path):
    trainer = make_trainer(max_duration="4ba", loggers=TensorboardLogger(flush_interval=1), run_name="plum")
    trainer.fit()
    assert len(list(Path("tensorboard_logs/plum").iterdir())) == 1
    trainer.close()


def test_a_closed_logger_serves_another_run(begun, read, tmp_path):
    logger = TensorboardLogger(log_dir=str(tmp_path))
    for run_name in ("plum", "pear"):
        engine = begun(logger, run_name=run_name)
        engine.logger.log_metrics({run_name: 1}, step=0)
        engine.close()
    assert read(tmp_path / "plum").Tags()["scalars"] == ["plum"]
    assert read(tmp_path / "pear").Tags()["scalars"] == ["pear"]


def test_a_disk_that_refuses_costs_a_warning(make_trainer, tmp_path):
    (tmp_path / "file").write_text("")
    logger = TensorboardLogger(log_dir=str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match=r"cannot be reached, so nothing is logged there: .*Error") as warned:
        trainer = make_trainer(max_duration="2ba", loggers=logger)
    trainer.fit()
    trainer.close()
    assert trainer.state.timestamp.batch == 2
    assert len(warned) == 1
