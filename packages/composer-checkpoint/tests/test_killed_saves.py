"""Processes killed at random instants of saves: what can be seen is whole, and nothing acknowledged is lost."""

import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from itertools import pairwise
from statistics import median

import pytest
import torch
import torch.distributed as tdist

from composer_checkpoint import find_newest, load_file, save_file, write_atomically
from composer_checkpoint.async_save import AsyncSaver
from composer_checkpoint.formats.per_rank import merge_local, save_local
from composer_checkpoint.lock import remove_leftovers
from composer_checkpoint.sharded import load_sharded, save_sharded, verify_folder
from composer_dist.testing import run_ranks

log = logging.getLogger(__name__)

SIZE = 200_000
NUM_WARM = 6
NUM_KILLS = 9  # of each kind, 108 in all
MOST_KILLS = 30  # where the machine is too busy for a kill to come when it should
KINDS = pytest.mark.parametrize("kind", ["file", "sharded", "local"])
WAYS = pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
SIZES = pytest.mark.parametrize("world_size", [1, 2])


def name_of(step):
    """Return a name that every other step shares with the one before."""
    return f"ba{step - step % 2}"


def save(kind, state, folder, step, saver, note):
    """Save a step; every other one replaces the one before."""
    path, overwrite = f"{folder}/{name_of(step)}", step % 2 == 1
    if kind == "local":
        path += "-rank{rank}.pt"
    if kind == "file" and tdist.get_rank():
        state = {}
    if saver is not None:
        saver.save(
            state, path, sharded=kind == "sharded", local=kind == "local", overwrite=overwrite, then=lambda: note(step)
        )
        return
    match kind:
        case "file":
            if not tdist.get_rank():
                with write_atomically(path, overwrite=overwrite) as unfinished:
                    save_file(state, unfinished)
            tdist.barrier()
        case "sharded":
            save_sharded(state, path, overwrite=overwrite)
        case "local":
            save_local(state, path, overwrite=overwrite)
    note(step)


def save_until_killed(kind, folder, background, fraction, victims):
    """Save again and again, until this rank is killed after that part of a save."""
    ended_s, begun = [time.monotonic()], threading.Event()

    def note(step):
        ended_s.append(time.monotonic())
        with (folder.parent / f"acknowledged{tdist.get_rank()}").open("a") as file:
            file.write(f"{step}\n")

    def kill():
        begun.wait()
        took_s = median(later - earlier for earlier, later in pairwise(ended_s[1:]))
        since, count = time.monotonic(), len(ended_s)
        time.sleep(fraction * took_s)
        at = (time.monotonic() - since) / took_s if len(ended_s) == count else 1.0
        (folder.parent / "instant").write_text(str(at))
        os.kill(os.getpid(), signal.SIGKILL)

    saver = AsyncSaver() if background else None
    state = {f"w{tdist.get_rank()}": torch.zeros(SIZE), "all": torch.zeros(SIZE)}
    if tdist.get_rank() in victims:
        threading.Thread(target=kill, daemon=True).start()
    for step in range(1_000_000):
        for tensor in state.values():
            tensor.fill_(step)
        if saver is not None:
            saver.wait()
        if step == NUM_WARM:
            begun.set()
        save(kind, state, folder, step, saver, note)


def steps_in(kind, folder, world_size):
    """Return the step of each checkpoint that can be seen, after comparing it with its hashes."""
    steps = []
    for path in {file.with_name(file.name.partition("-rank")[0]) for file in folder.iterdir()}:
        match kind:
            case "file":
                state = load_file(path)
            case "sharded":
                verify_folder(path)
                state = {f"w{rank}": torch.zeros(SIZE) for rank in range(world_size)} | {"all": torch.zeros(SIZE)}
                load_sharded(state, path)
            case "local":
                merge_local(f"{path}-rank{{rank}}.pt")
                states = [load_file(f"{path}-rank{rank}.pt") for rank in range(world_size)]
                state = {
                    f"{rank}-{name}": state[name] for rank, state in enumerate(states) for name in ("all", f"w{rank}")
                }
        found = {int(value) for tensor in state.values() for value in tensor.unique()}
        assert len(found) == 1, f"{path} mixes steps"
        steps += found
    return steps


def check_after_kill(tmp_path, kind, background, world_size, fraction, generator):
    """Kill after a part of the time that a save takes, and return the part that it was."""
    folder = tmp_path / "saved"
    folder.mkdir()
    ranks = list(range(world_size))
    arguments = (kind, folder, background, fraction, generator.choice([ranks, ranks[:1], ranks[-1:]]))
    with pytest.raises(AssertionError, match="rank"):
        run_ranks(save_until_killed, *arguments, store=tmp_path / "store", world_size=world_size)
    remove_leftovers(folder, locked=True)
    newest = max(steps_in(kind, folder, world_size), default=-1)
    found = find_newest(folder)
    assert (found.path.name.partition("-rank")[0], found.skipped) == (name_of(newest), ())
    acknowledged = []
    for rank in ranks:
        note = tmp_path / f"acknowledged{rank}"
        acknowledged += [int(line) for line in note.read_text().splitlines()] if note.exists() else []
    assert newest >= max(acknowledged)
    return float((tmp_path / "instant").read_text())


@KINDS
@SIZES
@WAYS
def test_after_a_kill_each_visible_checkpoint_is_whole_and_none_is_lost(tmp_path, kind, background, world_size):
    generator = random.Random(f"{kind}{background}{world_size}")
    check_after_kill(tmp_path, kind, background, world_size, generator.random(), generator)


@pytest.mark.slow
@KINDS
@SIZES
@WAYS
def test_after_kills_all_over_the_save_each_visible_checkpoint_is_whole_and_none_is_lost(
    tmp_path, kind, background, world_size
):
    generator = random.Random(7)
    # Evenly spread, and at random within each piece; a little beyond the end, since no save takes what another did.
    fractions = [1.1 * (kill + generator.random()) / NUM_KILLS for kill in range(NUM_KILLS)]
    thirds = Counter()
    for kill in range(MOST_KILLS):
        if kill >= NUM_KILLS:
            if {0, 2} <= thirds.keys():
                break
            fractions.append(generator.random() / 3 if 0 not in thirds else 1.1)
        attempt = tmp_path / str(kill)
        attempt.mkdir()
        instant = check_after_kill(attempt, kind, background, world_size, fractions[kill], generator)
        thirds[min(2, int(3 * instant))] += 1
    log.info("%s: kills in each third of a save: %s", tmp_path.name, [thirds[third] for third in range(3)])
    assert {0, 2} <= thirds.keys()  # from one end to the other
