"""Disks that hang and ranks that do not come: named on all ranks within a time, and nothing half saved is left."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as tdist

from composer_checkpoint import AsyncSaver, StorageError, load_file, save_sharded, verify
from composer_checkpoint.formats.per_rank import save_local
from composer_dist.testing import run_ranks

KINDS = pytest.mark.parametrize("kind", ["local", "sharded", "async-local", "async-sharded"])

SHORT_S = 1.0  # for the rank that is to run out of time; whatever it has to do takes a small part of it
AMPLE_S = 60.0  # for those that are not, however busy the machine is


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


def error_of_saving(kind, content, folder, timeout_s):
    """Return what a save raises, and after how long."""
    began = time.monotonic()
    try:
        save(kind, content, folder, timeout_s)
    except StorageError as error:
        return str(error), time.monotonic() - began
    return None


def save_with_a_hanging_disk(kind, folder):
    content = {"w": torch.ones(3), f"own{tdist.get_rank()}": torch.ones(3)}
    save(kind, content, folder / "first", AMPLE_S)  # what is imported for it is no part of the time
    if tdist.get_rank() == 1:
        os.fsync = lambda descriptor: time.sleep(100)
    return error_of_saving(kind, content, folder / "saved", SHORT_S if tdist.get_rank() == 1 else AMPLE_S)


@KINDS
def test_a_rank_whose_disk_hangs_is_named_on_all_ranks_and_nothing_is_left(tmp_path, kind):
    for name in ("first", "saved"):
        (tmp_path / name).mkdir()
    for text, took_s in run_ranks(save_with_a_hanging_disk, kind, tmp_path, store=tmp_path / "store"):
        assert "rank 1" in text
        assert f"save_timeout_in_seconds={SHORT_S}" in text
        assert took_s < 30
    assert list((tmp_path / "saved").iterdir()) == []
    assert list((tmp_path / "first").iterdir()) != []


def save_without_one_rank(kind, folder):
    content = {"w": torch.ones(3)}
    save(kind, content, folder / "first", AMPLE_S)
    given_up = folder / "given-up"
    if tdist.get_rank() == 1:
        wait_until(given_up.exists)
        return error_of_saving(kind, content, folder / "saved", AMPLE_S)
    error = error_of_saving(kind, content, folder / "saved", SHORT_S)
    given_up.touch()
    return error


def wait_until(is_so):
    deadline = time.monotonic() + AMPLE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("kind", ["local", "sharded"])
def test_a_rank_that_does_not_come_is_named_and_is_told_when_it_comes(tmp_path, kind):
    for name in ("first", "saved"):
        (tmp_path / name).mkdir()
    (waited, took_s), (late, _) = run_ranks(save_without_one_rank, kind, tmp_path, store=tmp_path / "store")
    assert "ranks [1] of 2 have not come" in waited
    assert 3 * SHORT_S <= took_s < 30
    assert "rank 1 came to save a checkpoint when others had waited" in late
    assert list((tmp_path / "saved").iterdir()) == []


def save_while_the_store_hangs(folder):
    """Let rank 0, which keeps the store of a new group, be stopped when rank 1 comes to save."""
    rank = tdist.get_rank()
    store = tdist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    found = [(os.getpid(), store.port)] if store else [None]
    tdist.broadcast_object_list(found, src=0)
    tdist.destroy_process_group()
    pid, port = found[0]
    store = store or tdist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    tdist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=AMPLE_S))
    content = {"w": torch.ones(3)}
    save("local", content, folder, AMPLE_S)
    if rank == 0:
        wait_until((folder / "given-up").exists)
        return None
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    try:
        return error_of_saving("local", content, folder / "saved", 0.1)
    finally:
        (folder / "given-up").touch()
        os.kill(pid, signal.SIGCONT)


@pytest.mark.skipif(sys.platform != "linux", reason="sees in /proc that a process was stopped")
def test_a_store_that_hangs_with_its_rank_keeps_no_other_rank_waiting(tmp_path):
    _, (text, took_s) = run_ranks(save_while_the_store_hangs, tmp_path, store=tmp_path / "store")
    assert "the ranks have not met within" in text
    assert "their store is silent" in text
    assert took_s < 30


def save_twice_in_time(folder):
    for step in range(3):
        save_local({"w": torch.full((3,), float(step))}, f"{folder}/ba{step}_rank{{rank}}.pt", timeout_s=20)
    return float(load_file(f"{folder}/ba2_rank{tdist.get_rank()}.pt")["w"][0])


def test_ranks_that_come_in_time_are_not_disturbed(tmp_path):
    assert run_ranks(save_twice_in_time, str(tmp_path / "saved"), store=tmp_path / "store") == [2.0, 2.0]


def test_a_run_of_one_rank_does_not_wait_forever_either(loop, saver, tmp_path):
    settings = {"filename": "ba{batch}.pt", "save_interval": "1ba"}
    loop([saver(**settings)], max_duration="1ba").fit()
    run = loop([saver(**settings, overwrite=True, save_timeout_in_seconds=0.4)])

    def hang(state):
        state.run_name = Hangs()

    with pytest.raises(StorageError, match=r"rank 0 .* has not done its part .* save_timeout_in_seconds=0\.4"):
        run.fit(hang)
    assert [path.name for path in (tmp_path / "checkpoints").glob("ba*")] == ["ba1.pt"]
    verify(tmp_path / "checkpoints" / "ba1.pt")


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_time_that_is_none_is_refused(saver, timeout_s):
    with pytest.raises(ValueError, match="save_timeout_in_seconds"):
        saver(save_timeout_in_seconds=timeout_s)
