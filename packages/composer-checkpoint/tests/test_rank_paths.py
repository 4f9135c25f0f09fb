"""The names under which two ranks save a checkpoint are names under which they load it, here and in a store."""

import itertools
import logging
import os
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from composer_checkpoint import CheckpointSaver, checkpoint_to_resume, load_checkpoint
from composer_checkpoint.state import Layout, path_of
from composer_dist import dist
from composer_dist.testing import run_ranks
from composer_events import Engine, Event, State

FOLDERS = [
    "flat",
    "./of-{world_size}/{local_world_size}",
    "{run_name}/rank{rank}",
    "file://{top}/store-{world_size}",
    "{top}/absolute",
]
NAMES = ["ba{batch}-rank{rank}.pt", "sub{rank}/ba{batch}-{world_size}.pt"]


def make_run(kind, callbacks=(), prefix_dir="ba{batch}"):
    torch.manual_seed(0)
    model, parallelism = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1)), None
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        settings = SimpleNamespace(state_dict_type=kind, sharded_ckpt_prefix_dir=prefix_dir)
        parallelism = SimpleNamespace(fsdp=settings, fsdp2=None, tp=None)
    state = State(
        model,
        1,
        "plum",
        "cpu",
        max_duration="3ba",
        optimizers=torch.optim.AdamW(model.parameters()),
        parallelism_config=parallelism,
        dataloader=[0, 1],
        callbacks=list(callbacks),
    )
    engine = Engine(state)
    engine.run_event(Event.INIT)
    return state, engine


def save(kind, saver, prefix_dir="ba{batch}"):
    state, engine = make_run(kind, [saver], prefix_dir)
    engine.run_event(Event.FIT_START)
    state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_batch(samples=1)
    engine.run_event(Event.BATCH_CHECKPOINT)
    engine.run_event(Event.FIT_END)
    engine.close()


def load(kind, path):
    state, engine = make_run(kind)
    load_checkpoint(path, state, None, progress_bar=False)
    engine.close()
    return int(state.timestamp.batch)


def resume(kind, saver):
    state, engine = make_run(kind, [saver])
    with checkpoint_to_resume(saver, state, engine.logger) as path:
        if path is not None:
            load_checkpoint(path, state, None, progress_bar=False)
    engine.close()
    return int(state.timestamp.batch)


def save_and_load(top, kind):
    """Return from which batch each name has led on, 1 where it was found."""
    os.chdir(top)
    seen = {}
    for number, (folder, name) in enumerate(zip(FOLDERS, itertools.cycle(NAMES), strict=False)):
        folder = f"{folder}/{number}".replace("{top}", top)
        settings = {"latest_filename": "latest/rank{rank}.pt", "save_interval": "1ba"}
        save(kind, CheckpointSaver(folder, name, **settings))
        saved_as = os.path.join(os.path.dirname(name), "ba1") if kind == "sharded" else name.replace("{batch}", "1")
        for path in (f"{folder}/{saved_as}", f"{folder}/latest/rank{{rank}}.pt"):
            seen[path] = load(kind, path)
        seen[f"{folder} by itself"] = resume(kind, CheckpointSaver(folder, name, **settings))
    return seen


@pytest.mark.parametrize("kind", ["ddp", "sharded", "local"])
def test_a_checkpoint_is_loaded_by_the_names_it_was_saved_under(kind, tmp_path):
    """`{world_size}` stayed in the name and was not found, a pointer in a store "has no .metadata", and per-rank files
    in a folder with `{rank}` were refused by autoresume."""
    for seen in run_ranks(save_and_load, str(tmp_path), kind, world_size=2, store=tmp_path / "meeting"):
        assert seen == dict.fromkeys(seen, 1)
        assert len(seen) == 3 * len(FOLDERS)


def save_alone(top):
    save("local", CheckpointSaver(f"{top}/here", "ba{batch}-rank{rank}.pt", save_interval="1ba"))
    save("local", CheckpointSaver(f"file://{top}/there", "ba{batch}-rank{rank}.pt", save_interval="1ba"))


def refusals(top):
    """Return what is said of names that cannot be loaded, and of those that are not heeded when saving."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("composer_checkpoint").addHandler(handler)
    for prefix, name in itertools.product(
        (None, "own-ba{batch}"), ("sub/ba{batch}.pt", "sub/ep{epoch}-ba{batch}-rank{rank}.pt")
    ):
        save("sharded", CheckpointSaver(f"{top}/s", name, save_interval="1ba", overwrite=True), prefix)
    paths = {
        "sharded": ["s/sub/ep0-ba1-rank{rank}.pt", "s/sub/ep0-ba1/rank{rank}.pt", "s/sub/ba1.pt", "nowhere/{rank}.pt"],
        "local": ["here/ba1-rank{rank}.pt", "file://there/ba1-rank{rank}.pt"],
    }
    told = {}
    for kind, names in paths.items():
        for name in names:
            path = f"file://{top}/{name.removeprefix('file://')}" if name.startswith("file://") else f"{top}/{name}"
            try:
                load(kind, path)
            except (FileNotFoundError, ValueError) as error:
                told[name] = f"{type(error).__name__}: {error}"
    return told, [line for line in said if "save_filename" in line]


def test_names_that_lead_nowhere_are_answered_with_what_is_there(tmp_path):
    """`save_filename` of a sharded checkpoint was ignored in silence, its folder was not named where a file was asked
    for, and files of fewer ranks were told to be on a disk that all nodes share."""
    top = str(tmp_path)
    run_ranks(save_alone, top, world_size=1, store=tmp_path / "alone")
    ranks = run_ranks(refusals, top, world_size=2, store=tmp_path / "together")
    told, said = ranks[0]
    beside = "Sharded checkpoints are folders, which are loaded by their names: "
    for name in ("s/sub/ep0-ba1-rank{rank}.pt", "s/sub/ep0-ba1/rank{rank}.pt"):
        assert told[name].partition(beside)[2].startswith(f"{top}/s/sub/ep0-ba1")
    assert f"{top}/s/sub/own-ba1" in told["s/sub/ba1.pt"]
    assert told["nowhere/{rank}.pt"].endswith("Check the path.")
    for told, _ in ranks:
        for name in ("here/ba1-rank{rank}.pt", "file://there/ba1-rank{rank}.pt"):
            assert told[name].startswith("ValueError: ")
            assert "is one of the files of 1 ranks, and 2 load them" in told[name]
    (line,) = said
    assert "save_filename='sub/ba{batch}.pt'" in line
    assert "'sub/ep{epoch}-ba{batch}'" in line
    assert "sharded_ckpt_prefix_dir" in line
    assert ranks[1][1] == []


def test_a_file_name_that_sharded_checkpoints_do_not_have_is_told_once(caplog, monkeypatch):
    """A run with `save_filename='mine.pt'` saved under another name, and no word of it."""
    state = State(torch.nn.Linear(1, 1), 0, device="cpu")
    monkeypatch.setattr("composer_checkpoint.state.layout_of", lambda _: Layout.SHARDED)
    for filename in ("ep{epoch}-ba{batch}-rank{rank}.pt", "mine.pt", "mine.pt"):
        assert path_of(state, filename).endswith("ep0-ba0")
    assert [record.getMessage().partition(" does not name")[0] for record in caplog.records] == [
        "save_filename='mine.pt'"
    ]
