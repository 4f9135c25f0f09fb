"""The Trainer's arguments about saving, loading and resuming."""

import os
import shutil

import pytest
import torch

from composer.callbacks import CheckpointSaver
from composer.core import Callback, Event
from composer.loggers import RemoteUploaderDownloader
from composer.utils import checkpoint
from composer_checkpoint import CheckpointError


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def trained(make_trainer, folder):
    """Train for two epochs of two batches, saved after each epoch."""
    trainer = make_trainer(max_duration="2ep", save_folder=str(folder), run_name="plum")
    trainer.fit()
    trainer.close()
    return trainer


def names(folder):
    return sorted(os.listdir(folder))


def weights(trainer):
    return [parameter.detach().clone() for parameter in trainer.state.model.parameters()]


def test_saving_to_a_folder_is_every_epoch_with_a_link_to_the_latest(trained, folder):
    assert names(folder) == ["ep1-ba2-rank0.pt", "ep2-ba4-rank0.pt", "latest-rank0.pt"]
    assert trained.saved_checkpoints == [str(folder / "ep1-ba2-rank0.pt"), str(folder / "ep2-ba4-rank0.pt")]


def test_the_documents_example_saves_and_loads(make_trainer, make_loader, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"train_dataloader": make_loader(8, 4), "eval_dataloader": make_loader(8, 4)}
    trainer = make_trainer(**settings, max_duration="3ep", save_folder="checkpoints", save_interval="1ep")
    trainer.fit()
    os.makedirs("path/to/checkpoint")
    os.rename("checkpoints/ep2-ba4-rank0.pt", "path/to/checkpoint/mosaic_states.pt")
    resumed = make_trainer(**settings, max_duration="3ep", load_path="path/to/checkpoint/mosaic_states.pt")
    assert resumed.state.timestamp.epoch == 2
    resumed.fit()
    torch.testing.assert_close(weights(resumed), weights(trainer), rtol=0, atol=0)


def test_nothing_is_saved_where_nothing_was_asked_for(make_trainer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(max_duration="1ep")
    trainer.fit()
    assert names(tmp_path) == []
    assert trainer.saved_checkpoints == []


def test_a_checkpoint_can_be_saved_at_any_time(make_trainer, tmp_path):
    trainer = make_trainer(max_duration="1ep")
    path = trainer.save_checkpoint(str(tmp_path / "ep{epoch}-{run_name}.pt"))
    assert path == str(tmp_path / f"ep0-{trainer.state.run_name}.pt")
    assert make_trainer(load_path=path).state.timestamp.batch == 0
    weights_path = trainer.save_checkpoint(str(tmp_path / "weights.pt"), weights_only=True)
    assert sorted(checkpoint.safe_torch_load(weights_path)["state"]) == ["integrations", "metadata", "model"]


def test_a_checkpoint_can_be_saved_to_the_folder_at_any_time(make_trainer, folder):
    trainer = make_trainer(max_duration="1ep", save_folder=str(folder))
    trainer.save_checkpoint_to_save_folder()
    assert names(folder) == ["ep0-ba0-rank0.pt", "latest-rank0.pt"]
    with pytest.raises(ValueError, match="save_folder"):
        make_trainer(max_duration="1ep").save_checkpoint_to_save_folder()


def test_a_saver_among_the_callbacks_comes_before_the_arguments(make_trainer, tmp_path):
    saver = CheckpointSaver(str(tmp_path / "own"), "ba{batch}.pt", save_interval="1ba")
    trainer = make_trainer(max_duration="1ep", callbacks=saver, save_folder=str(tmp_path / "other"))
    trainer.fit()
    assert names(tmp_path) == ["own"]
    assert trainer.saved_checkpoints == saver.saved_checkpoints
    assert trainer.state.callbacks.count(saver) == 1


def test_metrics_are_saved_where_asked_for(make_trainer, tmp_path):
    path = make_trainer(save_metrics=True).save_checkpoint(str(tmp_path / "with.pt"))
    assert "train_metrics" in checkpoint.safe_torch_load(path)["state"]
    path = make_trainer().save_checkpoint(str(tmp_path / "without.pt"))
    assert "train_metrics" not in checkpoint.safe_torch_load(path)["state"]


def test_the_best_checkpoint_by_the_evaluation_stays(make_trainer, make_loader, folder):
    seen = {}

    class Watch(Callback):
        def run_event(self, event, state, logger):
            if event is Event.EPOCH_CHECKPOINT:
                seen[int(state.timestamp.epoch)] = float(state.eval_metric_values["MulticlassAccuracy"])

    keep = {"last": 1, "best": ("metrics/eval/MulticlassAccuracy", "max", 1)}
    trainer = make_trainer(
        max_duration="6ep",
        eval_dataloader=make_loader(16, 8),
        save_folder=str(folder),
        save_keep=keep,
        callbacks=Watch(),
    )
    trainer.fit()
    best = max(seen, key=lambda epoch: (seen[epoch], -epoch))
    assert {name.split("-")[0] for name in names(folder)} == {f"ep{best}", "ep6", "latest"}


def test_loading_restores_time_weights_and_optimizer(make_trainer, trained, folder):
    trainer = make_trainer(max_duration="3ep", load_path=str(folder / "latest-rank0.pt"), run_name="pear")
    torch.testing.assert_close(weights(trainer), weights(trained), rtol=0, atol=0)
    assert (trainer.state.timestamp.epoch, trainer.state.timestamp.batch) == (2, 4)
    assert trainer.state.run_name == "pear"
    assert trainer.state.load_path == str(folder / "latest-rank0.pt")


def test_loading_weights_alone_begins_at_zero(make_trainer, trained, folder):
    trainer = make_trainer(load_path=str(folder / "latest-rank0.pt"), load_weights_only=True)
    torch.testing.assert_close(weights(trainer), weights(trained), rtol=0, atol=0)
    assert trainer.state.timestamp.batch == 0


def test_parts_can_be_ignored(make_trainer, trained, folder):
    trainer = make_trainer(load_path=str(folder / "latest-rank0.pt"), load_ignore_keys=["state/timestamp"])
    assert trainer.state.timestamp.batch == 0
    torch.testing.assert_close(weights(trainer), weights(trained), rtol=0, atol=0)


def test_the_load_path_knows_the_run_and_the_rank(make_trainer, trained, folder):
    path = str(folder.parent / "{run_name}" / "latest-rank{rank}.pt")
    trainer = make_trainer(load_path=path, run_name="checkpoints")
    assert trainer.state.timestamp.batch == 4


def test_what_is_not_there_is_an_error_before_training(make_trainer, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Local path .* does not exist"):
        make_trainer(load_path=str(tmp_path / "nothing.pt"))


def test_loading_goes_through_the_module_that_users_replace(make_trainer, monkeypatch):
    asked = {}
    monkeypatch.setattr(checkpoint, "load_checkpoint", lambda **settings: asked.update(settings))
    trainer = make_trainer(
        load_path="s3://bucket/run/latest.pt", load_object_store=object(), load_exclude_algorithms=["A"]
    )
    assert asked.pop("object_store") is not None
    assert asked == {
        "state": trainer.state,
        "logger": trainer.logger,
        "path": "run/latest.pt",
        "load_weights_only": False,
        "strict_model_weights": True,
        "progress_bar": True,
        "ignore_keys": None,
        "exclude_algorithms": ["A"],
        "algorithm_passes": trainer.engine.algorithm_passes,
    }


def test_a_checkpoint_is_loaded_between_its_two_events(make_trainer, trained, folder):
    seen = {}

    class Watch(Callback):
        def run_event(self, event, state, logger):
            if event in (Event.BEFORE_LOAD, Event.AFTER_LOAD):
                seen[event] = int(state.timestamp.batch)

    with pytest.warns(UserWarning, match="Watch is not in the state_dict"):
        make_trainer(load_path=str(folder / "latest-rank0.pt"), callbacks=Watch())
    assert seen == {Event.BEFORE_LOAD: 0, Event.AFTER_LOAD: 4}


def test_a_run_that_is_started_again_goes_on_whatever_load_path_says(make_trainer, trained, folder):
    trainer = make_trainer(
        max_duration="3ep",
        save_folder=str(folder),
        run_name="plum",
        autoresume=True,
        load_path="ignored.pt",
        load_ignore_keys=["*"],
        load_weights_only=True,
    )
    assert trainer.state.timestamp.batch == 4
    trainer.fit()
    assert names(folder)[2:] == ["ep3-ba6-rank0.pt", "latest-rank0.pt"]


def test_a_run_that_is_started_for_the_first_time_begins_with_load_path(make_trainer, trained, folder, tmp_path):
    trainer = make_trainer(
        max_duration="3ep",
        save_folder=str(tmp_path / "new"),
        run_name="pear",
        autoresume=True,
        load_path=str(folder / "latest-rank0.pt"),
    )
    assert trainer.state.timestamp.batch == 4


def test_an_epoch_of_other_data_can_be_begun_again(make_trainer, make_loader, tmp_path):
    first = make_trainer(max_duration="1ba", save_folder=str(tmp_path), save_interval="1ba")
    first.fit()
    settings = {"train_dataloader": make_loader(24, 4), "load_path": str(tmp_path / "latest-rank0.pt")}
    with pytest.raises(CheckpointError, match="load_restart_epoch=True"):
        make_trainer(**settings)
    again = make_trainer(**settings, load_restart_epoch=True, max_duration="1ep")
    assert (again.state.timestamp.batch, again.state.timestamp.batch_in_epoch) == (1, 0)


def test_no_run_begins_from_zero_where_checkpoints_are_that_cannot_be_used(make_trainer, trained, folder):
    before = {}
    for path in folder.glob("ep*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        before[path] = bytes(content)
    with pytest.raises(FileExistsError, match=r"ep2-ba4.*ep1-ba2.*save_overwrite=True"):
        make_trainer(save_folder=str(folder), run_name="plum", autoresume=True)
    assert {path: path.read_bytes() for path in before} == before


def test_a_run_goes_on_from_where_somebody_went_back_to(make_trainer, trained, folder):
    back = make_trainer(
        max_duration="3ba",
        save_interval="1ba",
        save_folder=str(folder),
        save_overwrite=True,
        run_name="plum",
        load_path=str(folder / "ep1-ba2-rank0.pt"),
    )
    back.fit()
    back.close()
    again = make_trainer(save_folder=str(folder), run_name="plum", autoresume=True)
    assert again.state.timestamp.batch == 3


def test_the_name_of_the_run_may_come_from_the_environment(make_trainer, folder, monkeypatch):
    monkeypatch.setenv("RUN_NAME", "plum")
    assert make_trainer(save_folder=str(folder), autoresume=True).state.run_name == "plum"


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ({"autoresume": True, "save_folder": "x"}, ["When autoresume=True, the `run_name` must be specified"]),
        ({"autoresume": True, "run_name": "plum"}, ["The `save_folder` must be specified"]),
        (
            {"autoresume": True, "run_name": "plum", "save_folder": "x", "save_latest_filename": None},
            ["The `save_latest_filename` must be specified"],
        ),
        (
            {"autoresume": True, "run_name": "plum", "save_folder": "x", "save_weights_only": True},
            ["autoresume=True", "save_weights_only=True"],
        ),
        ({"save_folder": "x", "save_filename": "../ba{batch}.pt"}, ["save_filename", "leads out of the folder"]),
        ({"save_folder": "x", "save_filename": "model.pt"}, ["save_filename='model.pt'", "save_overwrite=True"]),
        (
            {"save_folder": "x", "save_num_checkpoints_to_keep": 2, "save_keep": {"last": 3}},
            ["save_num_checkpoints_to_keep=2", "save_keep"],
        ),
        ({"save_async": True}, ["save_async=True", "save_folder"]),
        ({"load_strict": True, "load_strict_model_weights": False}, ["load_strict", "load_strict_model_weights"]),
    ],
)
def test_arguments_that_contradict_each_other_are_named_before_anything_is_written(
    make_trainer, tmp_path, monkeypatch, settings, texts
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUN_NAME", raising=False)
    monkeypatch.delenv("COMPOSER_RUN_NAME", raising=False)
    with pytest.raises(ValueError) as refusal:  # noqa: PT011  # the texts are compared below
        make_trainer(**settings)
    for text in texts:
        assert text in str(refusal.value)
    assert names(tmp_path) == []


def test_an_argument_that_never_was_is_a_type_error(make_trainer):
    with pytest.raises(TypeError, match="unexpected keyword argument 'save_fodler'"):
        make_trainer(save_fodler="x")
    with pytest.raises(TypeError, match="load_ignore_keys='rng'"):
        make_trainer(load_ignore_keys="rng")


@pytest.mark.filterwarnings("ignore:.*is an older spelling:DeprecationWarning")
def test_older_names_of_arguments_still_work(make_trainer, trained, folder):
    state = checkpoint.safe_torch_load(folder / "ep2-ba4-rank0.pt")
    state["state"]["model"].popitem()
    torch.save(state, folder / "less.pt")
    arguments = {"load_path": str(folder / "less.pt"), "load_weights_only": True, "load_chunk_size": 1_048_576}
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict"):
        make_trainer(**arguments, load_strict=True)
    make_trainer(**arguments, load_strict=False)


def test_a_run_that_is_resumed_at_the_end_of_an_epoch_has_no_metrics_of_it(make_trainer, folder, recorder):
    make_trainer(max_duration="2ep", save_folder=str(folder), save_interval="1ba").fit()
    # Whoever listens has the metrics computed, which warns where they have seen nothing.
    path = str(folder / "ep0-ba2-rank0.pt")
    with pytest.warns(UserWarning, match="Recorder is not in the state_dict"):
        resumed = make_trainer(max_duration="3ba", load_path=path, loggers=recorder)
    resumed.fit()
    logged = [entry for entry in recorder.seen if entry[0] == "M" and "metrics/train/MulticlassAccuracy" in entry[2]]
    assert len(logged) == 1  # those of the third batch
    assert "MulticlassAccuracy" in resumed.state.train_metric_values


def test_begin_again_from_zero_after_loading_reads_the_epoch_from_its_start(make_trainer, make_loader, tmp_path):
    trainer = make_trainer(max_duration="1ba")
    trainer.fit()
    path = trainer.save_checkpoint(str(tmp_path / "ba1.pt"))
    resumed = make_trainer(max_duration="1ep", load_path=path)
    resumed.fit(reset_time=True)
    assert resumed.state.timestamp.batch == 2


def test_a_second_run_from_zero_saves_over_the_checkpoints_of_the_first(make_trainer, folder):
    trainer = make_trainer(max_duration="1ep", save_folder=str(folder), save_overwrite=True)
    trainer.fit()
    trainer.fit(reset_time=True)
    trainer.close()
    saved = torch.load(folder / "ep1-ba2-rank0.pt", weights_only=False)["state"]["model"]
    torch.testing.assert_close(list(saved.values()), weights(trainer), rtol=0, atol=0)


def test_only_without_spinning_the_batches_before_are_read_again(make_trainer, make_data, tmp_path):
    read = []

    class Counting(torch.utils.data.Dataset):
        data = make_data(8)

        def __len__(self):
            return 8

        def __getitem__(self, index):
            read.append(index)
            return self.data[index]

    def run(**settings):
        loader = torch.utils.data.DataLoader(Counting(), batch_size=2)
        return make_trainer(train_dataloader=loader, **settings)

    first = run(max_duration="3ba")
    first.fit()
    path = first.save_checkpoint(str(tmp_path / "ba3.pt"))
    read.clear()
    run(max_duration="4ba", load_path=path, spin_dataloaders=False).fit()
    assert read == [0, 1]
    read.clear()
    run(max_duration="4ba", load_path=path).fit()
    assert read == [0, 1, 6, 7]  # the first batch, for what a dataset makes as it loads it


def test_a_logger_that_uploads_under_other_names_cannot_have_a_latest_one(make_trainer):
    uploader = RemoteUploaderDownloader("memory://box", file_path_format_string="x/{remote_file_name}")
    with pytest.raises(ValueError, match="Specifying a `file_path_format_string` to a `RemoteUploader"):
        make_trainer(loggers=uploader)
    make_trainer(loggers=uploader, save_latest_filename=None)


def test_a_logger_that_uploads_several_files_at_a_time_cannot_resume(make_trainer, folder):
    uploader = RemoteUploaderDownloader("memory://box", num_concurrent_uploads=2)
    settings = {"save_folder": str(folder), "run_name": "plum", "loggers": [uploader]}
    with pytest.raises(ValueError, match="Multiple concurrent uploads is not currently supported when using"):
        make_trainer(**settings, autoresume=True)
    make_trainer(**settings)


def test_checkpoints_go_to_a_store_by_a_logger_and_a_lost_disk_resumes_from_there(make_trainer, folder, tmp_path):
    bucket = (tmp_path / "remote").as_uri()

    def make(max_duration):
        return make_trainer(
            loggers=RemoteUploaderDownloader(bucket),
            save_folder=str(folder),
            run_name="plum",
            max_duration=max_duration,
            autoresume=True,
        )

    first = make("1ep")
    first.fit()
    first.close()
    shutil.rmtree(folder)
    second = make("2ep")
    assert second.state.timestamp.epoch == 1
    second.fit()
    second.close()
