"""The checkpoints that stay in a store, and those that go."""

import os
import threading
import uuid
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from composer_checkpoint import CheckpointSaver, load_checkpoint, load_file, save_file
from composer_checkpoint.retention import delete_checkpoint, is_whole
from composer_checkpoint.sharded import save_sharded
from composer_checkpoint.stores import FsspecObjectStore
from composer_dist import dist
from composer_dist.testing import run_ranks
from composer_events import Engine, Event, State


@pytest.fixture
def bucket():
    return f"memory://{uuid.uuid4().hex}"


def saver_to(bucket, **settings):
    return CheckpointSaver(
        f"{bucket}/run", "ba{batch}.pt", "run/ba{batch}.pt", "latest.pt", "run/latest.pt", "1ba", **settings
    )


def in_store(bucket):
    return FsspecObjectStore(bucket).list_objects("run/")


def files(*batches):
    return [*(f"run/ba{batch}.pt" for batch in batches), "run/latest.pt.symlink"]


@pytest.mark.parametrize(
    ("settings", "here", "there"),
    [
        ({"num_checkpoints_to_keep": 1}, {6}, {1, 2, 3, 4, 5, 6}),
        ({"remote_num_checkpoints_to_keep": 2}, {1, 2, 3, 4, 5, 6}, {5, 6}),
        ({"keep": {"last": 2}}, {5, 6}, {1, 2, 3, 4, 5, 6}),
        ({"keep": {"last": 2, "remote": True}}, {5, 6}, {5, 6}),
        ({"keep": {"last": 1, "remote": {"last": 1, "every": "3ba"}}}, {6}, {3, 6}),
        ({"num_checkpoints_to_keep": 0, "keep": {"remote": 3}}, set(), {4, 5, 6}),
        ({"num_checkpoints_to_keep": 2, "keep": {"remote": True}}, {5, 6}, {5, 6}),
    ],
)
def test_rules_for_the_store_and_for_the_disk_are_told_apart(loop, bucket, settings, here, there):
    checkpoints = saver_to(bucket, **settings)
    loop([checkpoints]).fit()
    assert {int(name[2:-3]) for name in os.listdir(checkpoints.folder) if name.startswith("ba")} == here
    assert in_store(bucket) == files(*sorted(there))


def test_the_best_by_a_metric_stay_in_the_store(loop, bucket):
    accuracies = {1: 0.5, 2: 0.9, 3: 0.1, 4: 0.7, 5: 0.2, 6: 0.3}

    def evaluate(state):
        state.eval_metrics = {"eval": {"Accuracy": None}}
        state.eval_metric_values = {"Accuracy": torch.tensor(accuracies[int(state.timestamp.batch)])}
        loader, length = state.dataloader, state.dataloader_len
        state.set_dataloader(loader, "eval")
        run.engine.run_event(Event.EVAL_END)
        state.set_dataloader(loader, "train", length)

    run = loop([saver_to(bucket, keep={"remote": {"best": ("metrics/eval/Accuracy", "max", 2)}})])
    run.fit(evaluate)
    assert in_store(bucket) == files(2, 4, 6)  # and the newest, to which the pointer leads


@pytest.mark.parametrize("async_save", [False, True])
def test_a_resumed_run_deletes_what_the_one_before_it_has_put_there_and_nothing_else(
    loop, bucket, tmp_path, async_save
):
    settings = {"remote_num_checkpoints_to_keep": 2, "async_save": async_save}
    store = FsspecObjectStore(bucket)
    (tmp_path / "notes").write_text("not ours")
    for name in ("run/ba0.pt", "run/notes.txt"):
        store.upload_object(name, tmp_path / "notes")
    first = loop([saver_to(bucket, **settings)], max_duration="4ba")
    first.fit()
    first.engine.close()
    second = loop([saver_to(bucket, **settings)], max_duration="6ba")
    load_checkpoint(f"{bucket}/run/latest.pt.symlink", second.state, None, progress_bar=False)
    second.fit()
    assert in_store(bucket) == ["run/ba0.pt", "run/ba5.pt", "run/ba6.pt", "run/latest.pt.symlink", "run/notes.txt"]


def test_a_checkpoint_cannot_have_other_objects_deleted_than_those_of_the_run(loop, bucket, tmp_path):
    loop([saver_to(bucket, remote_num_checkpoints_to_keep=1)], max_duration="1ba").fit()
    store = FsspecObjectStore(bucket)
    (tmp_path / "notes").write_text("not ours")
    strangers = ["other/ba1.pt", "run/notes.txt", "run/other/ba1.pt"]
    for name in strangers:
        store.upload_object(name, tmp_path / "notes")
    store.download_object("run/ba1.pt", tmp_path / "ba1.pt")
    content = load_file(tmp_path / "ba1.pt", mmap=False)
    saved = content["state"]["callbacks"]["CheckpointSaver"]["kept_remotely"]["saved"]
    saved[:0] = [(name, saved[0][1], {}) for name in strangers]
    save_file(content, tmp_path / "hostile.pt")
    run = loop([saver_to(bucket, remote_num_checkpoints_to_keep=1)], max_duration="3ba")
    load_checkpoint(tmp_path / "hostile.pt", run.state, run.engine.logger)
    run.fit()
    assert set(strangers) <= {*store.list_objects("run/"), *store.list_objects("other/")}
    assert "run/ba1.pt" not in in_store(bucket)


def test_nothing_is_deleted_whose_replacement_has_not_arrived(loop, bucket, monkeypatch):
    real, saved_the_fourth = FsspecObjectStore.upload_object, threading.Event()

    def lose_those_after_the_second(self, object_name, filename, callback=None, **kwargs):
        if "ba3" in object_name or "ba4" in object_name:
            saved_the_fourth.wait(60.0)
            raise PermissionError("the quota is used up")
        real(self, object_name, filename, callback, **kwargs)

    monkeypatch.setattr(FsspecObjectStore, "upload_object", lose_those_after_the_second)
    first = loop([saver_to(bucket, remote_num_checkpoints_to_keep=1)], max_duration="2ba")
    first.fit()
    first.engine.close()
    second = loop([saver_to(bucket, remote_num_checkpoints_to_keep=1)], max_duration="4ba")
    load_checkpoint(f"{bucket}/run/latest.pt.symlink", second.state, None, progress_bar=False)
    with pytest.raises(OSError, match="quota"):
        second.fit(lambda state: saved_the_fourth.set() if state.timestamp.batch == 4 else None)
    second.engine.close()
    assert in_store(bucket) == files(2)


def test_what_cannot_be_deleted_is_said_and_training_goes_on(loop, bucket, monkeypatch, caplog):
    def refuse(self, object_name):
        raise PermissionError("no right to delete")

    monkeypatch.setattr(FsspecObjectStore, "delete_object", refuse)
    loop([saver_to(bucket, remote_num_checkpoints_to_keep=1)], max_duration="3ba").fit()
    assert in_store(bucket) == files(1, 2, 3)
    assert "is left in the store" in caplog.text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"remote_num_checkpoints_to_keep": 0}, "would leave no checkpoint"),
        ({"keep": {"remote": True}}, "has no rules besides"),
        ({"keep": {"remote": {"newest": 1}}}, "does not say which checkpoints to keep"),
        ({"remote_num_checkpoints_to_keep": 2, "keep": {"remote": 2}}, "both say what to keep"),
    ],
)
def test_rules_for_the_store_that_cannot_be_meant_are_refused(bucket, settings, text):
    with pytest.raises(ValueError, match=text):
        saver_to(bucket, **settings)


def test_rules_for_a_store_need_one(tmp_path):
    with pytest.raises(ValueError, match="save_folder is a folder of this machine"):
        CheckpointSaver(str(tmp_path), remote_num_checkpoints_to_keep=2)


def test_of_a_folder_only_what_belongs_to_the_checkpoint_goes(tmp_path, bucket):
    store = FsspecObjectStore(bucket)
    save_sharded({"w": torch.ones(3)}, f"{bucket}/run/ep1")
    save_sharded({"w": torch.ones(3)}, f"{bucket}/run/ep10")
    (tmp_path / "notes").write_text("not ours")
    store.upload_object("run/ep1/notes.txt", tmp_path / "notes")
    assert is_whole(store, "run/ep1")
    delete_checkpoint(store, "run/ep1")
    assert not is_whole(store, "run/ep1")
    assert store.list_objects("run/ep1/") == ["run/ep1/notes.txt"]
    assert is_whole(store, "run/ep10")


def test_a_deletion_that_was_cut_short_left_no_checkpoint_and_is_finished_by_the_next(tmp_path, bucket):
    store = FsspecObjectStore(bucket)
    save_sharded({"w": torch.ones(3)}, f"{bucket}/run/ep1")
    deleted = []

    class DiesHalfway:
        def __getattr__(self, name):
            return getattr(store, name)

        def delete_object(self, name):
            if deleted:
                raise KeyboardInterrupt
            deleted.append(name)
            store.delete_object(name)

    with pytest.raises(KeyboardInterrupt):
        delete_checkpoint(DiesHalfway(), "run/ep1")
    assert deleted == ["run/ep1/composer_manifest.json"]
    assert not is_whole(store, "run/ep1")
    delete_checkpoint(store, "run/ep1")
    assert store.list_objects("run/") == []


def train(kind, folder, rank_that_fails):
    inside = folder.removeprefix("file:///")
    model = torch.nn.Linear(4, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    fsdp = SimpleNamespace(state_dict_type=kind, sharded_ckpt_prefix_dir="ba{batch}")
    saver = CheckpointSaver(
        folder,
        "ba{batch}-rank{rank}.pt",
        f"{inside}/ba{{batch}}-rank{{rank}}.pt",
        "latest-rank{rank}.pt",
        f"{inside}/latest-rank{{rank}}.pt",
        "1ba",
        remote_num_checkpoints_to_keep=1,
    )
    if dist.get_global_rank() == rank_that_fails:
        store = saver.remote_uploader.remote_backend
        upload = store.upload_object

        def fail(object_name, *arguments, **settings):
            if "ba3" in object_name:
                raise PermissionError("the quota is used up")
            upload(object_name, *arguments, **settings)

        store.upload_object = fail
    state = State(
        model,
        1,
        "plum",
        "cpu",
        max_duration="3ba",
        parallelism_config=SimpleNamespace(fsdp=fsdp, fsdp2=None, tp=None),
        dataloader=[0, 1, 2],
        callbacks=[saver],
    )
    engine = Engine(state)
    engine.run_event(Event.INIT)
    engine.run_event(Event.FIT_START)
    try:
        for _ in state.dataloader:
            state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_batch(samples=2)
            engine.run_event(Event.BATCH_CHECKPOINT)
        engine.run_event(Event.FIT_END)
    except Exception as error:  # also that the other rank is gone
        return str(error)
    return None


def there(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith((".", "latest")))


def test_per_rank_files_and_folders_go_on_all_ranks(tmp_path):
    for kind, left in (("local", ["ba3-rank0.pt", "ba3-rank1.pt"]), ("sharded", ["ba3"])):
        folder = tmp_path / kind
        run_ranks(train, kind, folder.as_uri(), None, store=tmp_path / f"store-{kind}")
        names = [name for name in there(folder) if kind == "local" or os.listdir(folder / name)]
        assert names == left


def test_no_rank_deletes_its_file_before_all_have_the_next(tmp_path):
    folder = tmp_path / "run"
    said = run_ranks(train, "local", folder.as_uri(), 1, store=tmp_path / "store")
    assert "quota" in said[1]
    assert {"ba2-rank0.pt", "ba2-rank1.pt"} <= set(there(folder))
