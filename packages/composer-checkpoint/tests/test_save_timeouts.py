"""Disks that hang and ranks that do not come: named on all ranks within a time, and nothing half saved is left."""

import os
import time

import pytest
import torch
import torch.distributed as tdist

from composer_checkpoint import AsyncSaver, StorageError, load_file, save_sharded
from composer_checkpoint.local_files import save_local
from composer_dist.testing import run_ranks

KINDS = pytest.mark.parametrize("kind", ["local", "sharded", "async-local", "async-sharded"])


class Hangs:
    """Something whose writing takes longer than anybody waits."""

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        time.sleep(20)
        return int, ()


def save(kind, content, folder, timeout_s):
    match kind:
        case "local":
            save_local(content, f"{folder}/ba1_rank{{rank}}.pt", timeout_s=timeout_s)
        case "sharded":
            save_sharded(content, folder / "ba1", timeout_s=timeout_s)
        case _:
            saver = AsyncSaver(timeout_s=timeout_s)
            local = kind == "async-local"
            saver.save(
                content, f"{folder}/ba1_rank{{rank}}.pt" if local else folder / "ba1", sharded=not local, local=local
            )
            saver.wait()


def save_with_a_hanging_disk(kind, folder):
    content = {"w": torch.ones(3), f"own{tdist.get_rank()}": torch.ones(3)}
    if tdist.get_rank() == 1:
        os.fsync = lambda descriptor: time.sleep(20)
    began = time.monotonic()
    try:
        save(kind, content, folder, 0.4)
    except StorageError as error:
        return str(error), time.monotonic() - began, sorted(path.name for path in folder.iterdir())
    return None


@KINDS
def test_a_rank_whose_disk_hangs_is_named_on_all_ranks_and_nothing_is_left(tmp_path, kind):
    folder = tmp_path / "saved"
    folder.mkdir()
    first, second = run_ranks(save_with_a_hanging_disk, kind, folder, store=tmp_path / "store")
    for text, took_s, _ in (first, second):
        assert "rank 1" in text
        assert "save_timeout_in_seconds=0.4" in text
        assert took_s < 5
    assert list(folder.iterdir()) == []


def save_without_one_rank(kind, folder):
    content = {"w": torch.ones(3)}
    if tdist.get_rank() == 1:
        time.sleep(2.5)
    began = time.monotonic()
    try:
        save(kind, content, folder, 0.3)
    except (StorageError, RuntimeError) as error:
        return str(error), time.monotonic() - began
    return None


@pytest.mark.parametrize("kind", ["local", "sharded"])
def test_a_rank_that_does_not_come_is_named_and_is_told_when_it_comes(tmp_path, kind):
    folder = tmp_path / "saved"
    folder.mkdir()
    (waited, took_s), (late, _) = run_ranks(save_without_one_rank, kind, folder, store=tmp_path / "store")
    assert "ranks [1] of 2 have not come" in waited
    assert 0.9 <= took_s < 2.5
    assert late  # the others are gone, or have said that they gave up
    assert list(folder.iterdir()) == []


def save_twice_in_time(folder):
    for step in range(3):
        save_local({"w": torch.full((3,), float(step))}, f"{folder}/ba{step}_rank{{rank}}.pt", timeout_s=20)
    return float(load_file(f"{folder}/ba2_rank{tdist.get_rank()}.pt")["w"][0])


def test_ranks_that_come_in_time_are_not_disturbed(tmp_path):
    assert run_ranks(save_twice_in_time, str(tmp_path / "saved"), store=tmp_path / "store") == [2.0, 2.0]


def test_a_run_of_one_rank_does_not_wait_forever_either(loop, saver, tmp_path):
    run = loop([saver("ba{batch}.pt", save_interval="1ba", save_timeout_in_seconds=0.4)])

    def hang(state):
        if state.timestamp.batch == 2:
            state.run_name = Hangs()

    with pytest.raises(StorageError, match=r"rank 0 .* has not done its part .* save_timeout_in_seconds=0\.4"):
        run.fit(hang)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("ba*")) == ["ba1.pt"]


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_time_that_is_none_is_refused(saver, timeout_s):
    with pytest.raises(ValueError, match="save_timeout_in_seconds"):
        saver(save_timeout_in_seconds=timeout_s)
