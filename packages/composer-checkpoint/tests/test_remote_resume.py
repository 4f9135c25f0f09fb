"""The newest whole checkpoint of a run in a store that two ranks share, in each of the layouts."""

import logging
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from composer_checkpoint import CheckpointConflictError, CheckpointSaver, checkpoint_to_resume, load_checkpoint
from composer_checkpoint.sharded import load_sharded, save_sharded
from composer_dist import dist
from composer_dist.testing import run_ranks
from composer_events import Engine, Event, State

KINDS = ["ddp", "sharded", "local"]


class CountingFileSystem(LocalFileSystem):
    """Local files that are said to be elsewhere, and a list of those that were fetched."""

    protocol = "counting"
    cachable = False
    fetched = []  # noqa: RUF012  # of the process

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("counting://"))

    def get_file(self, path1, path2, callback=None, **kwargs):
        self.fetched.append(os.path.basename(path1))
        shutil.copyfile(path1, path2)


fsspec.register_implementation("counting", CountingFileSystem, clobber=True)


def make_saver(folder, **settings):
    inside = folder.removeprefix("file:///").removeprefix("counting:///")
    names = ("ba{batch}-rank{rank}.pt", f"{inside}/ba{{batch}}-rank{{rank}}.pt")
    return CheckpointSaver(
        folder, *names, "latest-rank{rank}.pt", f"{inside}/latest-rank{{rank}}.pt", "1ba", **settings
    )


def make_run(kind, saver):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    parallelism = None
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        parallelism = SimpleNamespace(
            fsdp=SimpleNamespace(state_dict_type=kind, sharded_ckpt_prefix_dir="ba{batch}"), fsdp2=None, tp=None
        )
    state = State(
        model,
        1,
        "plum",
        "cpu",
        max_duration="3ba",
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.1),
        parallelism_config=parallelism,
        dataloader=[torch.full((2, 3), float(index)) for index in range(4)],
        dataloader_label="train",
        callbacks=[saver],
    )
    engine = Engine(state)
    engine.run_event(Event.INIT)
    return state, engine


def train(kind, folder, **settings):
    """Save after each of three batches, and return the weights after each."""
    state, engine = make_run(kind, make_saver(folder, **settings))
    engine.run_event(Event.FIT_START)
    seen = {}
    for batch in state.dataloader[:3]:
        state.optimizers[0].zero_grad()
        state.model(batch).sum().backward()
        engine.run_event(Event.AFTER_TRAIN_BATCH)
        state.optimizers[0].step()
        state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_batch(samples=2)
        engine.run_event(Event.BATCH_END)
        engine.run_event(Event.BATCH_CHECKPOINT)
        seen[int(state.timestamp.batch)] = weights(state)
    engine.run_event(Event.FIT_END)
    engine.close()
    return seen


def weights(state):
    parts = state.model.state_dict().values()
    return [(part.full_tensor() if isinstance(part, DTensor) else part).tolist() for part in parts]


class Said(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []
        logging.getLogger("composer_checkpoint").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


def resume(kind, folder):
    """Return the batch that was resumed from, the weights, and what was said about others."""
    said = Said()
    saver = make_saver(folder)
    state, engine = make_run(kind, saver)
    with checkpoint_to_resume(saver, state, engine.logger) as path:
        if path is not None:
            load_checkpoint(path, state, engine.logger)
    batch = int(state.timestamp.batch)
    engine.close()
    return batch, weights(state), [line for line in said.lines if line.startswith("Skipped")]


def damage(folder, kind, batch, how):
    """Do to a checkpoint in the store what happens to them."""
    own = folder / f"ba{batch}"
    match kind, how:
        case "sharded", "unfinished":
            (own / "composer_manifest.json").unlink()
            (own / ".metadata").unlink()
        case "sharded", "missing":
            (own / "__1_0.distcp").unlink()
        case "sharded", "flipped":
            flip(own / "__1_0.distcp")
        case "local", "missing" | "unfinished":
            (folder / f"ba{batch}-rank1.pt").unlink()
        case "local", "flipped":
            flip(folder / f"ba{batch}-rank1.pt")
        case "ddp", "missing" | "unfinished":
            (folder / f"ba{batch}-rank0.pt").unlink()
        case "ddp", "flipped":
            flip(folder / f"ba{batch}-rank0.pt")


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory):
    """What two ranks have saved to a store in one of the layouts."""
    folder = tmp_path_factory.mktemp(request.param)
    first, _ = run_ranks(train, request.param, (folder / "run").as_uri(), store=folder / "store")
    return SimpleNamespace(kind=request.param, folder=folder / "run", weights=first)


def copy_of(trained, tmp_path):
    folder = shutil.copytree(trained.folder, tmp_path / "run")
    for pointer in folder.glob("*.symlink"):  # they name what is in the bucket, and the bucket is the disk
        pointer.write_text(pointer.read_text().replace(str(trained.folder)[1:], str(folder)[1:]))
    return folder


def copies_that_something_happened_to(trained, tmp_path):
    """Return a folder for each thing that can happen to a store, by its name."""
    folders = {"nothing": trained.folder}
    for how in ("unfinished", "missing", "flipped"):
        folders[how] = copy_of(trained, tmp_path / how)
        damage(folders[how], trained.kind, 3, how)
    for how in ("unfinished", "flipped"):
        folders[f"all-{how}"] = copy_of(trained, tmp_path / f"all-{how}")
        for batch in (1, 2, 3):
            damage(folders[f"all-{how}"], trained.kind, batch, how)
    for how in ("older-pointer", "no-pointer"):
        folders[how] = copy_of(trained, tmp_path / how)
        for pointer in folders[how].glob("*.symlink"):
            older = pointer.read_text().replace("ba3", "ba1")
            pointer.unlink()
            if how == "older-pointer":
                pointer.write_text(older)
    return folders


def resume_each(kind, folders):
    """Return what comes of resuming from each folder, and from a store that does not answer."""
    found = {how: outcome(resume, kind, folder) for how, folder in folders.items()}
    return {**found, "no answer": outcome(fail_to_reach, kind, folders["nothing"])}


def outcome(call, *arguments):
    try:
        return call(*arguments)
    except OSError as error:
        return type(error).__name__, str(error)


@pytest.fixture(scope="module")
def resumed(trained, tmp_path_factory):
    """What comes of it on two ranks, by what has happened to the store."""
    tmp_path = tmp_path_factory.mktemp("resumed")
    folders = copies_that_something_happened_to(trained, tmp_path)
    uris = {how: folder.as_uri() for how, folder in folders.items()}
    first, second = run_ranks(resume_each, trained.kind, uris, store=tmp_path / "store")
    assert first == second
    return first


def test_all_ranks_resume_from_the_newest_in_the_store(trained, resumed):
    assert resumed["nothing"] == (3, trained.weights[3], [])


@pytest.mark.parametrize("how", ["unfinished", "missing", "flipped"])
def test_what_is_not_whole_is_skipped_by_all_ranks_and_named_with_the_reason(trained, resumed, how):
    batch, found, said = resumed[how]
    assert (batch, found) == (2, trained.weights[2])
    if how == "flipped" or trained.kind != "ddp":
        assert len(said) == 1
        assert "ba3" in said[0]


def test_no_run_begins_anew_where_none_is_whole(resumed):
    kind, text = resumed["all-flipped"]
    assert kind == CheckpointConflictError.__name__
    places = [re.search(rf"\bba{batch}\b", text).start() for batch in (3, 2, 1)]  # not in the digits of a hash
    assert places == sorted(places)  # the newest first
    assert "save_overwrite=True" in text


def test_what_no_save_has_finished_is_no_reason_not_to_begin_anew(resumed):
    assert resumed["all-unfinished"][0] == 0


@pytest.mark.parametrize("how", ["older-pointer", "no-pointer"])
def test_a_pointer_that_is_missing_or_leads_to_an_older_one_decides_nothing(trained, resumed, how):
    assert resumed[how] == (3, trained.weights[3], [])


def test_a_store_that_does_not_answer_is_no_reason_to_begin_anew(resumed):
    assert "the key has expired" in resumed["no answer"][1]


def go_back(kind, folder):
    """Train on from the first batch's checkpoint, over the later ones, for one batch."""
    saver = make_saver(folder, overwrite=True)
    state, engine = make_run(kind, saver)
    name = {"ddp": "ba1-rank0.pt", "sharded": "ba1", "local": "ba1-rank{rank}.pt"}[kind]
    path = folder.removeprefix("file://")
    load_checkpoint(f"{path}/{name}", state, engine.logger)
    engine.run_event(Event.FIT_START)
    state.optimizers[0].zero_grad()
    state.model(state.dataloader[3]).sum().backward()
    engine.run_event(Event.AFTER_TRAIN_BATCH)
    state.optimizers[0].step()
    state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_batch(samples=2)
    engine.run_event(Event.BATCH_END)
    engine.run_event(Event.BATCH_CHECKPOINT)
    engine.run_event(Event.FIT_END)
    found = weights(state)
    engine.close()
    return found


def go_back_and_resume(kind, folder):
    return go_back(kind, folder), resume(kind, folder)


def test_later_checkpoints_of_a_run_that_somebody_went_back_from_are_not_resumed(trained, tmp_path):
    folder = copy_of(trained, tmp_path)
    for expected, resumed in run_ranks(go_back_and_resume, trained.kind, folder.as_uri(), store=tmp_path / "store"):
        batch, found, said = resumed
        assert (batch, found) == (2, expected)
        assert len(said) == 1
        assert "ba3" in said[0]
        assert "a run that was abandoned" in said[0]


def fail_to_reach(kind, folder):
    """Look for a checkpoint in a store that cannot be asked for anything."""
    saver = make_saver(folder)
    state, engine = make_run(kind, saver)

    def refuse(*_, **__):
        raise PermissionError("the key has expired")

    filesystem = saver.remote_uploader.remote_backend.filesystem
    filesystem.find = filesystem.info = refuse
    try:
        with checkpoint_to_resume(saver, state, engine.logger):
            return "resumed"
    finally:
        engine.close()


def begin_again_and_over(kind, folder, copied):
    """Return the refusal to begin from zero over later checkpoints, and do it where that is said to be right."""
    saver = make_saver(folder)
    _, engine = make_run(kind, saver)
    with pytest.raises(FileExistsError, match="may conflict with a future checkpoint") as refusal:
        engine.run_event(Event.FIT_START)
    engine.close()
    train(kind, copied, overwrite=True)
    return str(refusal.value)


def test_no_run_begins_from_zero_over_later_checkpoints_of_a_store(trained, tmp_path):
    folders = [trained.folder.as_uri(), copy_of(trained, tmp_path).as_uri()]
    first, second = run_ranks(begin_again_and_over, trained.kind, *folders, store=tmp_path / "store")
    assert first == second
    assert "ba3" in first
    assert "save_overwrite=True" in first


def fetch_own_shard(folder):
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.arange(40.0).view(10, 4), mesh, [Shard(0)])}
    save_sharded(state, folder)
    CountingFileSystem.fetched.clear()
    target = {"w": distribute_tensor(torch.zeros(10, 4), mesh, [Shard(0)])}
    load_sharded(target, folder)
    assert torch.equal(target["w"].to_local(), state["w"].to_local())
    return sorted(CountingFileSystem.fetched)


def test_each_rank_fetches_only_the_files_that_it_needs(tmp_path):
    uri = f"counting://{tmp_path}/ep1"
    for rank, fetched in enumerate(run_ranks(fetch_own_shard, uri, store=tmp_path / "store")):
        assert fetched == [".metadata", f"__{rank}_0.distcp", "composer_manifest.json"]


def count_fetches(kind, folder):
    CountingFileSystem.fetched.clear()
    batch, _, _ = resume(kind, folder)
    assert batch == 3
    return [name for name in CountingFileSystem.fetched if not name.endswith(".symlink")]


def test_the_ranks_of_a_node_fetch_each_file_once(trained, tmp_path):
    uri = f"counting://{trained.folder}"
    first, second = run_ranks(count_fetches, trained.kind, uri, store=tmp_path / "store")
    both = first + second
    assert len(both) == len(set(both))
    assert Path(trained.folder).exists()
