"""Offline runs of Weights & Biases, read back from the files that `wandb sync` would send."""

import json
import pickle
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from composer.core import Callback
from composer.loggers import InMemoryLogger, WandBLogger

pytestmark = pytest.mark.skipif(find_spec("wandb") is None, reason="needs the extra 'wandb'")

_BLOCK = 32 * 1024
_RECORD_HEADER = 7


@pytest.fixture
def make_logger(tmp_path):
    """Make a logger whose files are in the test's own folder: W&B reads its variables once in a process."""

    def make(init_kwargs=None, **settings):
        return WandBLogger(init_kwargs={"mode": "offline", "dir": str(tmp_path), **(init_kwargs or {})}, **settings)

    return make


@pytest.fixture
def records(tmp_path):
    """Read the records of the one run, once its end is among them: the file is whole shortly after `finish`."""

    def read():
        (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
        deadline = time.monotonic() + 120
        while not of_kind(found := parse(path.read_bytes()), "exit"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return found

    return read


def of_kind(records, kind):
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def parse(data):
    """Take the records out of LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    position, payload, found = _RECORD_HEADER, b"", []
    while position + _RECORD_HEADER <= len(data):
        if _BLOCK - position % _BLOCK < _RECORD_HEADER:
            position += _BLOCK - position % _BLOCK
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        payload += data[position + _RECORD_HEADER : position + _RECORD_HEADER + length]
        position += _RECORD_HEADER + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(payload)
            found.append(record)
            payload = b""
    return found


@pytest.fixture
def history(records):
    """Read what was logged at each step."""

    def read():
        return [
            {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in row.item}
            for row in of_kind(records(), "history")
        ]

    return read


def media(tmp_path, pattern):
    return sorted(tmp_path.glob(f"wandb/offline-run-*/files/media/{pattern}"))


def test_the_points_of_a_training_are_those_that_were_logged(make_trainer, history, make_logger):
    memory = InMemoryLogger()
    trainer = make_trainer(max_duration="3ba", loggers=[make_logger(project="plums"), memory], run_name="plum")
    trainer.fit()
    trainer.close()
    rows = {row["_step"]: row for row in history()}
    for stamp, value in memory.data["loss/train/total"]:
        assert rows[int(stamp.batch)]["loss/train/total"] == pytest.approx(float(value), rel=1e-6)
    import wandb

    assert wandb.run is None


def test_the_settings_and_the_names_of_the_run(make_trainer, records, make_logger):
    logger = make_logger({"project": "pears", "notes": "sweet"}, project="plums", tags=["a"])
    trainer = make_trainer(max_duration="1ba", loggers=logger, run_name="plum", auto_log_hparams=True)
    trainer.fit()
    trainer.close()
    (run,) = of_kind(records(), "run")
    assert (run.project, run.display_name, run.notes, list(run.tags)) == ("plums", "plum", "sweet", ["a"])
    updates = [config.update for config in of_kind(records(), "config")]
    config = {
        item.key or "/".join(item.nested_key): json.loads(item.value_json) for several in updates for item in several
    }
    assert (config["rank_zero_seed"], config["max_duration"]) == (3, "1ba")
    assert logger.run_url is None
    assert logger.run_dir is not None


def test_each_rank_has_a_run_of_its_own_where_that_is_asked_for(begun, records, make_logger):
    begun(make_logger(rank_zero_only=False), run_name="plum").close()
    (run,) = of_kind(records(), "run")
    assert (run.display_name, run.run_group) == ("plum-rank0", "plum")


def test_a_table_is_one_file(begun, tmp_path, make_logger):
    engine = begun(make_logger())
    engine.logger.log_table(["a", "b"], [[1, "x"], [2, "y"]], name="mine", step=1)
    engine.close()
    (path,) = media(tmp_path, "table/*.json")
    table = json.loads(path.read_text())
    assert (table["columns"], table["data"]) == (["a", "b"], [[1, "x"], [2, "y"]])


@pytest.mark.parametrize(
    ("images", "channels_last", "num_images"),
    [
        (torch.rand(8), False, None),
        (torch.rand(8, 0), False, None),
        (torch.rand(2, 2, 3, 8, 8), False, None),
        ([torch.rand(2, 3, 8, 8)], False, None),
        (torch.rand(8, 8), False, 1),
        (torch.rand(3, 8, 8), False, 1),
        (torch.rand(8, 8, 3, dtype=torch.bfloat16), True, 1),
        (torch.rand(4, 3, 8, 8), False, 4),
        (np.random.rand(2, 8, 8, 3), True, 2),
        ([torch.rand(8, 8), torch.rand(3, 8, 8)], False, 2),
    ],
)
def test_images_of_each_layout(begun, tmp_path, images, channels_last, num_images, make_logger):
    engine = begun(make_logger())
    if num_images is None:
        with pytest.raises(ValueError, match=r"cannot be shown\. An image has a height, a width"):
            engine.logger.log_images(images, "mine", channels_last, step=0, use_table=False)
    else:
        engine.logger.log_images(images, "mine", channels_last, step=0, use_table=False)
        engine.close()
        assert len(media(tmp_path, "images/*.png")) == num_images


def test_floats_from_0_to_1_are_as_bright_as_they_say(begun, tmp_path, make_logger):
    from PIL import Image

    engine = begun(make_logger())
    ramp = torch.linspace(0, 1, 64).reshape(8, 8)
    engine.logger.log_images(ramp, "mine", step=0, use_table=False)
    engine.close()
    (path,) = media(tmp_path, "images/*.png")
    np.testing.assert_array_equal(np.asarray(Image.open(path).convert("L")), np.round(ramp.numpy() * 255))


def test_images_in_a_table_have_a_row_each(begun, tmp_path, make_logger):
    engine = begun(make_logger())
    engine.logger.log_images(torch.rand(3, 3, 8, 8), "mine", step=0, use_table=True)
    engine.close()
    (path,) = media(tmp_path, "table/*.json")
    assert path.name.startswith("mine Table")
    assert len(json.loads(path.read_text())["data"]) == 3


def test_masks_lie_beside_their_images(begun, tmp_path, make_logger):
    engine = begun(make_logger())
    masks = {"truth": torch.randint(0, 3, (2, 8, 8)), "guess": torch.randint(0, 3, (2, 8, 8))}
    labels = {0: "sky", 1: "tree", 2: "plum"}
    engine.logger.log_images(
        torch.rand(2, 3, 8, 8), "mine", step=0, masks=masks, mask_class_labels=labels, use_table=False
    )
    engine.close()
    assert len(media(tmp_path, "images/mask/*.png")) == 4


@pytest.mark.parametrize(
    ("masks", "said"),
    [(torch.zeros(2, 3, 8, 8), "has a mask of shape"), (torch.zeros(3, 8, 8), "has 3 masks for 2 images")],
)
def test_masks_that_do_not_fit(begun, masks, said, make_logger):
    engine = begun(make_logger())
    with pytest.raises(ValueError, match=said):
        engine.logger.log_images(torch.rand(2, 3, 8, 8), masks={"mine": masks})


def test_files_become_artifacts_with_the_time_that_they_are_of(make_trainer, records, tmp_path, make_logger):
    class Upload(Callback):
        def batch_end(self, state, logger):
            path = tmp_path / "model.pt"
            path.write_bytes(b"weights")
            logger.upload_file("plum/model.pt", path)
            path.write_bytes(b"others")  # as is allowed as soon as that returns

    logger = make_logger(log_artifacts=True)
    trainer = make_trainer(max_duration="1ba", loggers=logger, callbacks=Upload())
    with pytest.warns(UserWarning, match=r"W&B knows no artifact called 'plum/model.pt'.*'plum.model.pt'"):
        trainer.fit()
    trainer.close()
    (artifact,) = of_kind(records(), "artifact")
    assert (artifact.name, artifact.type, sorted(artifact.aliases)) == ("plum.model.pt", "model", ["ep0-ba1", "latest"])
    assert json.loads(artifact.metadata)["timestamp/batch"] == 1


@pytest.mark.parametrize("trouble", ["down", "refuses"])
def test_no_copy_of_a_file_stays_behind_that_wandb_does_not_take(begun, make_logger, tmp_path, monkeypatch, trouble):
    def raise_error(*arguments, **settings):
        raise OSError("no room")

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setattr("wandb.init" if trouble == "down" else "wandb.Artifact.add_file", raise_error)
    (tmp_path / "model.pt").write_bytes(b"weights")

    def log_files():
        engine = begun(make_logger(log_artifacts=True))
        for name in ("ep1.pt", "ep2.pt"):
            engine.logger.upload_file(name, tmp_path / "model.pt")
        engine.close()

    with pytest.warns(RuntimeWarning, match="OSError: no room"):
        log_files()
    assert list(scratch.glob("composer-*")) == []


def test_files_are_not_kept_unless_that_is_asked_for(begun):
    assert not WandBLogger().can_upload_files()
    assert WandBLogger(log_artifacts=True).can_upload_files()


def test_a_download_needs_to_know_from_where(begun):
    with pytest.raises(RuntimeError, match="entity=None and project='plums' must both be known"):
        WandBLogger(project="plums").download_file("model.pt", "here.pt")


def test_a_logger_can_be_pickled_while_it_logs(begun, make_logger):
    logger = make_logger({"mode": "disabled"})
    begun(logger)
    assert pickle.loads(pickle.dumps(logger)).entity == "disabled"
    pickle.loads(pickle.dumps(logger.state_dict()))


def test_a_wrong_argument_is_an_error_before_training(make_trainer, make_logger):
    with pytest.raises(TypeError, match="no_such_argument"):
        make_trainer(loggers=make_logger({"no_such_argument": 1}))


def test_values_that_wait_when_a_script_just_ends_are_there(tmp_path, history):
    script = """
import torch
from composer.core import Engine, Event, State
from composer.loggers import Logger, WandBLogger
wandb = WandBLogger()
engine = Engine(State(None, rank_zero_seed=0, run_name="plum", device="cpu", callbacks=[wandb]))
engine.run_event(Event.INIT)
for step in range(100):
    engine.logger.log_metrics({"loss": step}, step=step)
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True)
    assert [row["loss"] for row in history()] == list(range(100))


def test_a_run_that_raises_ends_as_failed(make_trainer, records, make_logger):
    class Fail(Callback):
        def batch_end(self, state, logger):
            raise ArithmeticError("no more")

    with (
        pytest.raises(ArithmeticError, match="no more"),
        make_trainer(max_duration="2ba", loggers=make_logger(), callbacks=Fail()) as trainer,
    ):
        trainer.fit()
    (ended,) = of_kind(records(), "exit")
    assert ended.exit_code == 1


def test_artifacts_of_one_rank_of_several_are_a_warning(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"`rank_zero_only` should be set to False\."):
        WandBLogger(log_artifacts=True)


def test_files_stay_where_they_are_told_to(begun, tmp_path, make_logger):
    begun(make_logger({"dir": str(tmp_path / "elsewhere")})).close()
    assert list(Path(tmp_path / "elsewhere").glob("wandb/offline-run-*"))
