"""Saving a training state at intervals, from a loop of one's own."""

import os
import re
import stat
import subprocess
import sys
import time
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from composer_checkpoint import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointSaver,
    CompressorNotFound,
    FolderInUseError,
    RetentionPolicy,
    load_checkpoint,
    load_file,
    read_manifest,
    save_checkpoint,
    save_file,
    verify,
)
from composer_checkpoint import async_save as async_save_module
from composer_checkpoint.stores import FsspecObjectStore
from composer_events import Callback, Event, LoggerDestination, State


def names(folder):
    return sorted(os.listdir(folder))


def rank_zero(*stems):
    return sorted([*(f"{stem}-rank0.pt" for stem in stems), "latest-rank0.pt"])


@pytest.mark.parametrize(
    ("interval", "stems"),
    [
        ("1ep", ["ep1-ba2", "ep2-ba4", "ep3-ba6"]),
        (2, ["ep2-ba4", "ep3-ba6"]),
        ("2ba", ["ep0-ba2", "ep1-ba4", "ep2-ba6"]),
        ("4ba", ["ep1-ba4", "ep3-ba6"]),
        ("0.5dur", ["ep1-ba3", "ep2-ba6"]),
        ("1dur", ["ep2-ba6"]),
        (lambda state, event: event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 5, ["ep2-ba5"]),
        ("0ep", []),
    ],
)
def test_a_checkpoint_is_saved_at_each_interval_and_once_at_the_end(loop, saver, tmp_path, interval, stems):
    loop([saver(save_interval=interval)]).fit()
    assert names(tmp_path / "checkpoints") == (rank_zero(*stems) if stems else [])


def test_a_replaced_method_saves_by_the_name_that_composer_has(loop, saver, tmp_path):
    """The method that LLM-Shearing puts on the saver failed: 'CheckpointSaver' has no '_save_checkpoint'."""

    def batch_checkpoint(state, logger):
        if own.save_interval(state, Event.BATCH_CHECKPOINT) and own.last_checkpoint_batch != state.timestamp.batch:
            own._save_checkpoint(state, logger)

    own = saver(save_interval="4ba")
    own.batch_checkpoint = batch_checkpoint
    loop([own]).fit()
    assert names(tmp_path / "checkpoints") == rank_zero("ep1-ba4", "ep3-ba6")


@pytest.mark.parametrize("num_kept", [-1, 0, 1, 2, 3, 4])
def test_as_many_of_the_newest_stay_as_asked_for(loop, saver, tmp_path, num_kept):
    checkpoints = saver(save_interval="1ba", num_checkpoints_to_keep=num_kept)
    loop([checkpoints]).fit()
    stems = ["ep0-ba1", "ep0-ba2", "ep1-ba3", "ep1-ba4", "ep2-ba5", "ep2-ba6"]
    kept = stems if num_kept == -1 else stems[len(stems) - num_kept :]
    expected = [f"{stem}-rank0.pt" for stem in kept]
    assert [os.path.basename(path) for path in checkpoints.saved_checkpoints] == expected
    # Where all are deleted, because they are copied elsewhere, there is nothing that a link could lead to.
    assert names(tmp_path / "checkpoints") == (rank_zero(*kept) if num_kept else [])
    assert len(checkpoints.all_saved_checkpoints_to_timestamp) == 6


def test_the_best_by_a_metric_and_every_nth_stay_besides_the_newest(loop, saver, tmp_path):
    accuracies = {1: 0.5, 2: 0.9, 3: 0.1, 4: 0.7, 5: 0.2, 6: 0.3}

    def evaluate(state):
        state.eval_metrics = {"eval": {"Accuracy": None}}
        state.eval_metric_values = {"Accuracy": torch.tensor(accuracies[int(state.timestamp.batch)])}
        loader, length = state.dataloader, state.dataloader_len
        state.set_dataloader(loader, "eval")
        run.engine.run_event(Event.EVAL_END)
        state.set_dataloader(loader, "train", length)

    keep = {"last": 1, "every": "3ba", "best": ("metrics/eval/Accuracy", "max", 2)}
    run = loop([saver("ba{batch}.pt", save_interval="1ba", keep=keep)])
    run.fit(evaluate)
    # Best: 2 and 4. Every third: 3 and 6. The last: 6.
    assert names(tmp_path / "checkpoints") == ["ba2.pt", "ba3.pt", "ba4.pt", "ba6.pt", "latest-rank0.pt"]


def test_the_metric_itself_says_which_are_best(loop, saver, tmp_path):
    """Without a mode the largest values were the best, whatever the metric says."""
    state_metric = SimpleNamespace(higher_is_better=False)

    def evaluate(state):
        state.eval_metric_values = {"Accuracy": torch.tensor([0.5, 0.1, 0.9][int(state.timestamp.batch) % 3])}
        loader, length = state.dataloader, state.dataloader_len
        state.set_dataloader(loader, "eval")
        run.engine.run_event(Event.EVAL_END)
        state.set_dataloader(loader, "train", length)

    keep = RetentionPolicy(last=1, metric="metrics/eval/Accuracy", num_best=1)
    run = loop([saver("ba{batch}.pt", save_interval="1ba", keep=keep)])
    run.state.eval_metrics = {"eval": {"Accuracy": state_metric}}
    run.fit(evaluate)
    assert names(tmp_path / "checkpoints") == ["ba1.pt", "ba6.pt", "latest-rank0.pt"]


def test_a_mode_that_nobody_knows_is_asked_for_before_anything_is_trained_on(loop, saver):
    with pytest.raises(ValueError, match=r"'metrics/eval/Foo' nor its name.*'max' or 'min'"):
        loop([saver(keep={"best": ("metrics/eval/Foo", None, 1)})]).fit()


@pytest.mark.parametrize("metric", ["metrics/eval/Acuracy", "metrics/evel/Accuracy"])
def test_a_metric_that_no_evaluation_measures_is_an_error_before_anything_is_deleted(loop, saver, tmp_path, metric):
    def evaluate(state):
        if state.timestamp.batch == 3:
            state.eval_metrics = {"eval": {"Accuracy": None}}
            state.eval_metric_values = {"Accuracy": torch.tensor(0.5)}
            state.set_dataloader(state.dataloader, "eval")
            run.engine.run_event(Event.EVAL_END)

    run = loop([saver("ba{batch}.pt", save_interval="1ba", keep={"best": (metric, "max", 1)})])
    with pytest.raises(ValueError, match=rf"{metric}'.*Measured are metrics/eval/Accuracy"):
        run.fit(evaluate)
    assert {"ba1.pt", "ba2.pt"} <= set(names(tmp_path / "checkpoints"))


def test_the_link_leads_to_the_newest_by_a_relative_path(loop, saver, tmp_path):
    loop([saver()]).fit()
    assert os.readlink(tmp_path / "checkpoints" / "latest-rank0.pt") == "ep3-ba6-rank0.pt"


def test_names_may_have_the_run_and_folders_of_their_own(loop, tmp_path, saver):
    checkpoints = saver("{run_name}/ep{epoch:03d}/ba{batch}.pt", latest_filename="{run_name}/latest.pt")
    loop([checkpoints], max_duration="1ep").fit()
    folder = tmp_path / "checkpoints" / "plum"
    assert names(folder) == ["ep001", "latest.pt"]
    assert os.readlink(folder / "latest.pt") == "ep001/ba2.pt"


def test_no_link_is_made_where_none_is_wanted(loop, saver, tmp_path):
    loop([saver(latest_filename=None)], max_duration="1ep").fit()
    assert names(tmp_path / "checkpoints") == ["ep1-ba2-rank0.pt"]


def test_a_checkpoint_has_the_layout_that_readers_know(loop, saver, tmp_path):
    loop([saver()], max_duration="1ep").fit()
    content = load_file(tmp_path / "checkpoints" / "ep1-ba2-rank0.pt")
    assert sorted(content) == ["rng", "state"]
    state = content["state"]
    assert sorted(state["optimizers"]["AdamW"]["state"]) == ["bias", "weight"]
    assert state["timestamp"]["Timestamp"]["batch"] == 2
    assert state["run_name"] == "plum"
    assert set(content["rng"][0]) >= {"python", "torch"}
    saved = state["callbacks"]["CheckpointSaver"]["all_saved_checkpoints_to_timestamp"]
    assert [os.path.basename(name) for name, _ in saved] == ["ep1-ba2-rank0.pt"]  # it lists itself


def test_the_manifest_says_when_and_in_which_run_it_was_saved(loop, saver, tmp_path):
    loop([saver()], max_duration="1ep").fit()
    info = read_manifest(tmp_path / "checkpoints" / "ep1-ba2-rank0.pt").info
    assert info["run_name"] == "plum"
    assert (info["timestamp"]["epoch"], info["timestamp"]["batch"], info["world_size"]) == (1, 2, 1)


def test_weights_only_leaves_out_what_resuming_needs(loop, saver, tmp_path):
    loop([saver(weights_only=True)], max_duration="1ep").fit()
    content = load_file(tmp_path / "checkpoints" / "ep1-ba2-rank0.pt")
    assert {key: sorted(value) for key, value in content.items()} == {"state": ["integrations", "metadata", "model"]}


def test_what_is_left_out_of_the_file_stays_in_training(loop, saver, tmp_path):
    run = loop([saver(ignore_keys=["state/optimizers/AdamW/state/weight/exp_avg", "rng"])], max_duration="1ep")
    run.fit()
    content = load_file(tmp_path / "checkpoints" / "ep1-ba2-rank0.pt")
    assert "exp_avg" not in content["state"]["optimizers"]["AdamW"]["state"]["weight"]
    assert "rng" not in content
    assert "exp_avg" in run.state.optimizers[0].state[run.layer.weight]


@pytest.mark.parametrize("extension", [".pt", ".tar", ".tar.gz", ".pt.gz", ".pt.bz2", ".pt.xz", ""])
def test_the_name_says_the_format(loop, tmp_path, extension):
    run = loop(max_duration="1ep")
    run.fit()
    path = save_checkpoint(run.state, str(tmp_path / ("ba{batch}" + extension)))
    assert os.path.basename(path) == "ba2" + extension
    assert torch.equal(load_file(path)["state"]["model"]["weight"], run.layer.weight)


def test_a_program_that_is_missing_is_an_error_before_training(saver, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CompressorNotFound, match="Could not find command"):
        saver("ba{batch}.pt.gz")
    with pytest.raises(CompressorNotFound, match="Could not find compressor"):
        saver("ba{batch}.pt.rar")
    with pytest.raises(ValueError, match="does not end with a valid tarfile extension"):
        saver("ba{batch}.tar.rar")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"filename": "../ba{batch}.pt"}, "leads out of the folder"),
        ({"filename": "model.pt"}, "several checkpoints one name"),
        ({"filename": "ep{epoch}.pt", "save_interval": "1ba"}, "several checkpoints one name"),
        ({"latest_filename": "../latest"}, "save_latest_filename='../latest' leads out of the folder"),
        ({"latest_filename": ""}, "save_latest_filename='' is not a file name"),
        ({"filename": "last.pt", "latest_filename": "last.pt", "overwrite": True}, "would replace it"),
        ({"num_checkpoints_to_keep": -2}, "save_num_checkpoints_to_keep=-2"),
        ({"num_checkpoints_to_keep": 2, "keep": {"last": 3}}, "both say how many"),
        ({"keep": {"newest": 3}}, "does not say which checkpoints to keep"),
        ({"save_async_policy": "hope"}, "save_async_policy='hope'"),
        ({"save_interval": "often"}, "often"),
        ({"save_interval": "-1ep"}, "or 0 for never"),
        ({"save_interval": -1}, "or 0 for never"),
        ({"keep": {"every": "often"}}, r"save_keep=\{'every': 'often'\} cannot be used: every='often'"),
        ({"keep": {"best": ("loss", "min", 0)}}, "does not say which checkpoints are best"),
        ({"remote_file_name": ""}, "remote_file_name='' is empty"),
        ({"num_concurrent_uploads": 0}, "num_concurrent_uploads=0 must be 1 or more"),
        ({"remote_num_checkpoints_to_keep": -2}, "remote_num_checkpoints_to_keep=-2 must be -1 or more"),
        (
            {"upload_timeout_in_seconds": float("nan")},
            "upload_timeout_in_seconds=nan must be a finite number of seconds",
        ),
        ({"save_timeout_in_seconds": float("inf")}, "save_timeout_in_seconds=inf must be a finite.*or None"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_at_once(saver, settings, text):
    with pytest.raises(ValueError, match=text):
        saver(**settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("folder", 5),
        ("folder", None),
        ("filename", 5),
        ("remote_file_name", 5),
        ("latest_filename", True),
        ("latest_remote_file_name", b"latest"),
        ("save_interval", 1.5),
        ("save_interval", None),
        ("save_interval", True),
        ("overwrite", "no"),
        ("weights_only", "no"),
        ("ignore_keys", 5),
        ("num_concurrent_uploads", "2"),
        ("upload_timeout_in_seconds", "60"),
        ("async_save", "no"),
        ("save_timeout_in_seconds", "60"),
        ("remote_num_checkpoints_to_keep", 1.5),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named_when_the_saver_is_made(name, value):
    with pytest.raises(TypeError, match=rf"{name}={re.escape(repr(value))} .*([Pp]ass|give|Accepted|must be)"):
        CheckpointSaver(**{name: value})


def test_later_checkpoints_of_another_run_are_not_replaced(loop, saver, tmp_path):
    loop([saver()]).fit()
    with pytest.raises(CheckpointConflictError, match="may conflict with a future checkpoint") as refusal:
        loop([saver()]).fit()
    assert "save_overwrite=True" in str(refusal.value)
    assert isinstance(refusal.value, FileExistsError)
    loop([saver(overwrite=True)]).fit()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a file system that takes no new folders")
def test_a_folder_that_cannot_be_made_is_a_checkpoint_error_before_training(loop):
    run = loop([CheckpointSaver("/proc/runs")])
    with pytest.raises(CheckpointError, match="/proc/runs cannot be made"):
        run.fit()
    assert run.state.timestamp.batch == 0


def test_later_checkpoints_of_other_names_keep_the_link(loop, saver, tmp_path):
    loop([saver()], max_duration="2ep").fit()
    run = loop([saver("b{batch}.pt")], max_duration="1ep")
    with pytest.raises(CheckpointConflictError, match=r"ep2-ba4-rank0\.pt, to which latest-rank0\.pt leads"):
        run.fit()
    assert os.readlink(tmp_path / "checkpoints" / "latest-rank0.pt") == "ep2-ba4-rank0.pt"
    loop([saver("b{batch}.pt", overwrite=True)], max_duration="1ep").fit()
    assert os.readlink(tmp_path / "checkpoints" / "latest-rank0.pt") == "b2.pt"


def test_earlier_checkpoints_are_no_conflict(loop, saver):
    loop([saver()], max_duration="1ep").fit()
    run = loop([saver()], max_duration="2ep")
    run.state.timestamp = run.state.timestamp.copy(epoch=1, batch=2)
    run.fit()


HOLD = """
import sys, time
from composer_checkpoint import FolderLock
with FolderLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_that_another_process_saves_to_is_refused(loop, saver, tmp_path):
    folder = tmp_path / "checkpoints"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(FolderInUseError, match=f"process {holder.pid}"):
            loop([saver()]).fit()
        holder.communicate()
    loop([saver()]).fit()


def test_nothing_but_checkpoints_and_the_link_is_left_in_the_folder_after_fit(loop, saver, tmp_path):
    loop([saver()], max_duration="1ep").fit()
    assert names(tmp_path / "checkpoints") == rank_zero("ep1-ba2")


def test_an_asynchronous_checkpoint_is_the_state_of_its_batch(loop, saver, tmp_path):
    seen = {}
    checkpoints = saver("ba{batch}.pt", save_interval="1ba", async_save=True)
    run = loop([checkpoints], max_duration="4ep")
    run.fit(lambda state: seen.update({int(state.timestamp.batch): run.layer.weight.detach().clone()}))
    for batch, weight in seen.items():
        path = tmp_path / "checkpoints" / f"ba{batch}.pt"
        verify(path)
        assert torch.equal(load_file(path)["state"]["model"]["weight"], weight)
    assert len(checkpoints.saved_checkpoints) == len(seen) == 8
    assert os.readlink(tmp_path / "checkpoints" / "latest-rank0.pt") == "ba8.pt"


def test_a_save_may_be_skipped_while_the_one_before_is_written_but_not_the_last(loop, saver, tmp_path):
    checkpoints = saver("ba{batch}.pt", save_interval="1ba", async_save=True, save_async_policy="skip")
    run = loop([checkpoints], max_duration="12ba")
    run.fit()
    saved = [os.path.basename(path) for path in checkpoints.saved_checkpoints]
    assert (saved[0], saved[-1]) == ("ba1.pt", "ba12.pt")
    assert [name for name in names(tmp_path / "checkpoints") if name.startswith("ba")] == sorted(saved)


def test_an_error_in_the_background_is_raised_at_a_later_batch(loop, saver, tmp_path):
    checkpoints = saver("ba{batch}.pt", save_interval="1ba", async_save=True)
    run = loop([checkpoints])

    def hold_what_no_checkpoint_can(state):
        state.run_name = object() if state.timestamp.batch == 2 else "plum"

    with pytest.raises(Exception, match="object"):
        run.fit(hold_what_no_checkpoint_can)
    assert run.state.timestamp.batch in (3, 4)
    assert "ba2.pt" not in names(tmp_path / "checkpoints")


class Keeper(Callback):
    """Keeps a number at first, and then something that is more than data."""

    def __init__(self):
        self.num_saves = 0

    def state_dict(self):
        self.num_saves += 1
        return {"h": 1 if self.num_saves == 1 else Fraction(1, 2)}


@pytest.mark.parametrize("async_save", [False, True])
def test_a_checkpoint_from_which_no_run_could_go_on_is_not_saved(loop, saver, tmp_path, async_save):
    checkpoints = saver("ba{batch}.pt", save_interval="1ba", num_checkpoints_to_keep=1, async_save=async_save)
    run = loop([checkpoints, Keeper()])
    with pytest.raises(CheckpointError, match=r"ba2\.pt was not saved.*state/callbacks/Keeper/h \(.*Fraction"):
        run.fit()
    assert [name for name in names(tmp_path / "checkpoints") if "rank" in name or "ba" in name] == [
        "ba1.pt",
        "latest-rank0.pt",
    ]
    assert os.readlink(tmp_path / "checkpoints" / "latest-rank0.pt") == "ba1.pt"


def test_a_failed_save_leaves_training_and_the_checkpoint_before_as_they_were(loop, saver, tmp_path):
    checkpoints = saver("ba{batch}.pt", save_interval="1ba")
    run = loop([checkpoints])

    def fill(state):
        if state.timestamp.batch == 2:
            run.weight = run.layer.weight.detach().clone()
            state.run_name = {"not": object()}

    with pytest.raises(Exception, match="object"):
        run.fit(fill)
    assert torch.equal(run.layer.weight, run.weight)
    verify(tmp_path / "checkpoints" / "ba1.pt")
    assert os.readlink(tmp_path / "checkpoints" / "latest-rank0.pt") == "ba1.pt"
    assert [name for name in names(tmp_path / "checkpoints") if name.startswith("ba2")] == []


@pytest.mark.parametrize("async_save", [False, True])
def test_a_resumed_run_deletes_what_the_one_before_it_has_saved(loop, saver, tmp_path, async_save, monkeypatch):
    """With `async_save`, what was being written when a checkpoint was begun was not in its list, and stayed forever."""

    def save_slowly(*arguments, **settings):
        time.sleep(0.1)  # longer than a batch takes, so that one save begins during another
        return save_file(*arguments, **settings)

    monkeypatch.setattr(async_save_module, "save_file", save_slowly)
    folder, settings = tmp_path / "checkpoints", {"num_checkpoints_to_keep": 2, "async_save": async_save}
    first = loop([saver(save_interval="1ba", **settings)], max_duration="2ep")
    first.fit()
    assert names(folder) == rank_zero("ep1-ba3", "ep1-ba4")
    second = loop([saver(save_interval="1ba", **settings)], max_duration="3ep")
    load_checkpoint(folder / "latest-rank0.pt", second.state, second.engine.logger)
    second.state.timestamp = second.state.timestamp.to_next_epoch()
    second.fit()
    assert names(folder) == rank_zero("ep2-ba5", "ep2-ba6")


def test_a_second_fit_deletes_what_the_first_has_saved(loop, saver, tmp_path):
    run = loop([saver(num_checkpoints_to_keep=1)], max_duration="1ep")
    run.fit()
    run.state.max_duration = "2ep"
    run.fit()
    assert names(tmp_path / "checkpoints") == rank_zero("ep2-ba4")


def test_checkpoints_elsewhere_are_never_deleted(loop, saver, tmp_path):
    loop([saver()], max_duration="1ep").fit()
    run = loop([CheckpointSaver(str(tmp_path / "other"), num_checkpoints_to_keep=1)], max_duration="3ep")
    load_checkpoint(tmp_path / "checkpoints" / "ep1-ba2-rank0.pt", run.state, run.engine.logger)
    run.fit()
    assert names(tmp_path / "checkpoints") == rank_zero("ep1-ba2")
    assert names(tmp_path / "other") == rank_zero("ep3-ba6")


def test_a_checkpoint_cannot_have_other_files_deleted_than_those_of_the_run(loop, saver, tmp_path):
    folder = tmp_path / "checkpoints"
    loop([saver()], max_duration="1ep").fit()
    content = load_file(folder / "ep1-ba2-rank0.pt", mmap=False)
    (folder / "other").mkdir()
    strangers = [folder / "notes.txt", folder / "ep0-ba1-rank0.pt", folder / "other" / "ep0-ba1-rank0.pt"]
    for stranger in strangers:
        stranger.write_text("not of this run")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "ep0-ba0-rank0.pt").write_text("not of this run")
    (folder / "leading-out").symlink_to(elsewhere)
    listed = [folder, folder / "other", elsewhere, *strangers, folder / "leading-out" / "ep0-ba0-rank0.pt"]
    kept = content["state"]["callbacks"]["CheckpointSaver"]["kept"]
    time = kept[0][1]
    kept[:0] = [*((str(path), time, {}) for path in listed), ("no time", {}, {}), None]
    save_file(content, tmp_path / "hostile.pt")
    run = loop([saver(num_checkpoints_to_keep=1)])
    load_checkpoint(tmp_path / "hostile.pt", run.state, run.engine.logger)
    run.fit()
    assert all(path.exists() for path in listed)
    assert not (folder / "ep1-ba2-rank0.pt").exists()  # which is this run's own
    assert (folder / "ep3-ba6-rank0.pt").exists()


def test_a_remote_folder_gets_each_checkpoint_and_a_pointer_that_moves_last(loop):
    address = "memory://saver-test/run"
    checkpoints = CheckpointSaver(
        address,
        "ba{batch}.pt",
        "run/ba{batch}.pt",
        "latest.pt",
        "run/latest.pt",
        "1ba",
        num_checkpoints_to_keep=1,
    )
    run = loop([checkpoints], max_duration="2ep")
    run.fit()
    store = FsspecObjectStore("memory://saver-test")
    assert sorted(store.list_objects("run/")) == [*(f"run/ba{n}.pt" for n in (1, 2, 3, 4)), "run/latest.pt.symlink"]
    assert names(checkpoints.folder) == ["ba4.pt", "latest.pt"]
    again = loop(max_duration="3ep")
    load_checkpoint(f"{address}/latest.pt.symlink", again.state, None, progress_bar=False)
    assert torch.equal(again.layer.weight, run.layer.weight)
    run.engine.close()
    assert not os.path.exists(checkpoints.folder)


class BeginsRun(LoggerDestination):
    """Has the attributes of an `MLFlowLogger`, which knows its run from the first event on."""

    experiment_id = run_id = None

    def init(self, state, logger):
        self.experiment_id, self.run_id = "7", "5eed"


def test_names_get_the_run_of_mlflow_that_a_logger_has_begun(loop, tmp_path):
    saver = CheckpointSaver(
        str(tmp_path / "{mlflow_experiment_id}"), "{mlflow_run_id}/ba{batch}.pt", latest_filename=None
    )
    loop([saver, BeginsRun()], "1ep").fit()
    assert names(tmp_path) == ["7"]
    assert read_manifest(tmp_path / "7" / "5eed" / "ba2.pt") is not None


def test_names_in_a_store_get_the_run_of_mlflow(loop):
    address = "memory://saver-of-run/{mlflow_run_id}"
    name = "{mlflow_run_id}/ba{batch}.pt"
    saver = CheckpointSaver(address, "ba{batch}.pt", name, "latest", "{mlflow_run_id}/latest")
    loop([BeginsRun(), saver], "1ep").fit()
    assert FsspecObjectStore("memory://saver-of-run").list_objects("5eed") == ["5eed/ba2.pt", "5eed/latest.symlink"]


def test_without_a_run_of_mlflow_the_placeholders_stay_as_they_are(loop, tmp_path):
    saver = CheckpointSaver(str(tmp_path), "{mlflow_run_id}-ba{batch}.pt", latest_filename=None)
    loop([saver], "1ep").fit()
    assert names(tmp_path) == ["{mlflow_run_id}-ba2.pt"]


def test_a_folder_in_the_place_of_the_link_is_found_before_training(loop, saver, tmp_path):
    (tmp_path / "checkpoints" / "latest-rank0.pt").mkdir(parents=True)
    run = loop([saver("ba{batch}-rank{rank}.pt", save_interval="1000ba")])
    with pytest.raises(CheckpointConflictError, match="is a folder, so that no link to the latest"):
        run.fit()


def test_names_of_a_saver_that_was_made_can_be_set_as_text(loop, tmp_path):
    """AttributeError: "'str' object has no attribute 'filename'" at the first save, or no setter at once."""
    saver = CheckpointSaver(str(tmp_path / "old"), latest_filename="old-link", save_interval="1ba")
    saver.filename, saver.latest_filename, saver.remote_file_name = "ba{batch}.pt", "link", None
    saver.folder = tmp_path / "new"
    saver.saved_checkpoints = ["earlier.pt"]
    saver.all_saved_checkpoints_to_timestamp = {}
    loop([saver], "1ep").fit()
    assert names(tmp_path) == ["new"]
    assert names(tmp_path / "new") == ["ba1.pt", "ba2.pt", "link"]
    assert saver.saved_checkpoints == ["earlier.pt", *(str(tmp_path / "new" / name) for name in ("ba1.pt", "ba2.pt"))]
    assert list(saver.all_saved_checkpoints_to_timestamp) == saver.saved_checkpoints[1:]
    assert saver.filename.format(None, keep_placeholders=True) == str(tmp_path / "new" / "ba{batch}.pt")


def test_a_save_flushes_the_file_before_its_name_and_the_folder_after_it_once_each(tmp_path, monkeypatch):
    """A small model took twice as long to save: the disk was waited for four times."""
    seen, flush, rename = [], os.fsync, os.replace

    def note_flush(descriptor):
        seen.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        flush(descriptor)

    def note_rename(source, target):
        seen.append("name")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(os, "replace", note_rename)
    save_checkpoint(State(torch.nn.Linear(2, 1), 1, "plum", "cpu"), f"{tmp_path}/ba{{batch}}.pt")
    assert seen == ["file", "name", "folder"]
