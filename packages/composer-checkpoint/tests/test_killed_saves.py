"""Processes killed at random instants of sharded saves: what can be seen is whole, and nothing acknowledged is lost."""

import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as tdist

from composer_checkpoint.async_save import AsyncSaver
from composer_checkpoint.commit import remove_leftovers
from composer_checkpoint.sharded import load_sharded, save_sharded, verify_folder
from composer_dist.testing import run_ranks

SIZE = 200_000


def save_until_killed(folder, background, delay_s):
    """Save again and again, and note each step once it is said to be there."""

    def kill():
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def note(step):
        with (folder.parent / f"acknowledged{tdist.get_rank()}").open("a") as file:
            file.write(f"{step}\n")

    saver = AsyncSaver()
    state = {f"w{tdist.get_rank()}": torch.zeros(SIZE), "all": torch.zeros(SIZE)}
    save_sharded(state, folder / "ba0")  # so that there is one to fall back to
    threading.Thread(target=kill, daemon=True).start()
    for step in range(1, 1_000_000):
        for tensor in state.values():
            tensor.fill_(step)
        # Every other save replaces the one before.
        path, overwrite = folder / f"ba{step - step % 2}", step % 2 == 1
        if background:
            saver.save(state, path, sharded=True, overwrite=overwrite, then=lambda step=step: note(step))
        else:
            save_sharded(state, path, overwrite=overwrite)
            note(step)


def check_after_kill(tmp_path, background, world_size, delay_s):
    folder = tmp_path / "saved"
    folder.mkdir()
    with pytest.raises(AssertionError, match="rank"):
        run_ranks(save_until_killed, folder, background, delay_s, store=tmp_path / "store", world_size=world_size)
    remove_leftovers(folder, locked=True)
    newest = -1
    for path in folder.iterdir():
        verify_folder(path)
        state = {f"w{rank}": torch.zeros(SIZE) for rank in range(world_size)} | {"all": torch.zeros(SIZE)}
        load_sharded(state, path)
        steps = {int(value) for tensor in state.values() for value in tensor.unique()}
        assert len(steps) == 1, f"{path} mixes steps"
        newest = max(newest, *steps)
    acknowledged = [0]
    for rank in range(world_size):
        note = tmp_path / f"acknowledged{rank}"
        acknowledged += [int(line) for line in note.read_text().splitlines()] if note.exists() else []
    assert newest >= max(acknowledged)
    return newest


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
def test_after_a_kill_each_visible_checkpoint_is_whole_and_none_is_lost(tmp_path, background, world_size):
    delay_s = random.Random(f"{background}{world_size}").uniform(0.1, 0.4)
    assert check_after_kill(tmp_path, background, world_size, delay_s) >= 0


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
def test_after_many_kills_each_visible_checkpoint_is_whole_and_none_is_lost(tmp_path, background, world_size):
    generator = random.Random(7)
    newest = []
    for kill in range(12):
        attempt = tmp_path / str(kill)
        attempt.mkdir()
        newest.append(check_after_kill(attempt, background, world_size, generator.uniform(0.0, 0.5)))
    assert max(newest) > 0  # the kills came while there was something to kill
