"""Models sharded by `fully_shard`, copied by DDP or plain, in per-rank files of a loop of one's own."""

import os
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from composer_checkpoint import IncompatibleCheckpointError, load_file
from composer_checkpoint.formats.per_rank import load_local_state, save_local_state
from composer_dist import dist
from composer_dist.testing import run_ranks


def make(kind, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))  # 5 rows for 2 ranks: uneven
    if kind == "sharded":
        fully_shard(model)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))


def step(model, optimizer, batch):
    optimizer.zero_grad()
    model(torch.full((2, 3), float(batch + dist.get_global_rank()))).sum().backward()
    optimizer.step()


def whole(model):
    parts = model.state_dict().values()
    return [(part.full_tensor() if isinstance(part, DTensor) else part).tolist() for part in parts]


def save_load_and_go_on(kind, folder):
    """Compare two steps after the file with two steps without it."""
    path = f"{folder}/ba{{batch}}_rank{{rank}}.pt".replace("{batch}", "2")
    model, optimizer = make(kind, 0)
    for batch in range(2):
        step(model, optimizer, batch)
    save_local_state(path, model, optimizer, info={"timestamp": {"batch": 2}})
    for batch in range(2, 4):
        step(model, optimizer, batch)
    again, its_optimizer = make(kind, 5)
    load_local_state(path, again, its_optimizer)
    for batch in range(2, 4):
        step(again, its_optimizer, batch)
    return whole(model) == whole(again), its_optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("kind", ["sharded", "ddp"])
def test_training_goes_on_from_per_rank_files_to_the_last_bit(tmp_path, kind):
    folder = tmp_path / "checkpoints"
    for is_same, lr in run_ranks(save_load_and_go_on, kind, str(folder), store=tmp_path / "store"):
        assert is_same
        assert lr == 0.1
    assert sorted(os.listdir(folder)) == ["ba2_rank0.pt", "ba2_rank1.pt"]
    rows = [load_file(folder / f"ba2_rank{rank}.pt")["state"]["model"]["0.weight"].shape[0] for rank in (0, 1)]
    assert rows == ([3, 2] if kind == "sharded" else [5, 5])


def load_with(kind, folder):
    model, optimizer = make(kind, 0)
    before = whole(model)
    with pytest.raises(ValueError, match="holds the files of 2 ranks, and 1 load them") as refusal:
        load_local_state(f"{folder}/ba2_rank{{rank}}.pt", model, optimizer)
    assert whole(model) == before
    return str(refusal.value)


def test_another_number_of_ranks_is_refused_and_told_what_helps(tmp_path, monkeypatch):
    monkeypatch.delenv("COMPOSER_LOCAL_ELASTIC", raising=False)
    run_ranks(save_load_and_go_on, "sharded", str(tmp_path), store=tmp_path / "store")
    (text,) = run_ranks(load_with, "sharded", str(tmp_path), store=tmp_path / "one", world_size=1)
    assert "merge_local" in text


def test_the_model_of_another_file_is_refused(tmp_path):
    model, _ = make("plain", 0)
    save_local_state(tmp_path / "rank{rank}.pt", model)
    with pytest.raises(IncompatibleCheckpointError, match=r"0\.weight"):
        load_local_state(tmp_path / "rank{rank}.pt", torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 1)))


def test_two_optimizers_of_one_class_cannot_be_told_apart(tmp_path):
    model, optimizer = make("plain", 0)
    with pytest.raises(ValueError, match="two have the same"):
        save_local_state(tmp_path / "rank{rank}.pt", model, [optimizer, optimizer])


def mix_two_saves(folder):
    """Leave what a run leaves that is killed while it replaces per-rank files."""
    path = f"{folder}/rank{{rank}}.pt"
    model, _ = make("sharded", 0)
    save_local_state(path, model)
    own = f"{folder}/rank{dist.get_global_rank()}.pt"
    before = Path(own).read_bytes()
    save_local_state(path, model)
    if dist.get_global_rank() == 1:
        Path(own).write_bytes(before)
    dist.barrier()
    with pytest.raises(Exception, match="are of different saves") as refusal:
        load_local_state(path, model)
    return type(refusal.value).__name__


def test_files_of_two_saves_are_not_taken_for_one_checkpoint(tmp_path):
    assert run_ranks(mix_two_saves, str(tmp_path), store=tmp_path / "store") == ["CorruptCheckpointError"] * 2
