"""A run of the Trainer that is stopped anywhere goes on as if it had not been."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from composer import Callback, Trainer
from composer.models import ComposerClassifier
from composer.utils import dist
from composer_checkpoint import verify
from composer_dist.testing import run_ranks


class Augmented(Dataset):
    """Points that look different each time, by the noise of all three generators."""

    def __init__(self):
        self.points = torch.randn(22, 2, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        noise = torch.tensor([random.random(), np.random.rand()], dtype=torch.float32) + torch.randn(2)
        return self.points[index] + 0.1 * noise, (self.points[index].sum() > 0).long()


class Losses(Callback):
    """Keeps the loss of each batch, to the last bit."""

    def __init__(self):
        self.seen = {}

    def batch_end(self, state, logger):
        self.seen[int(state.timestamp.batch)] = float(state.loss.detach()).hex()


def make_loader(num_workers, is_distributed):
    dataset = Augmented()
    sampler = dist.get_sampler(dataset, shuffle=True) if is_distributed else None
    return DataLoader(dataset, 4, shuffle=sampler is None, sampler=sampler, num_workers=num_workers)


def train(num_workers=0, is_distributed=False, callbacks=(), optimizer=torch.optim.AdamW, **settings):
    """Train a model with dropout and batch norm, and return the losses and the weights at the end."""
    torch.set_num_threads(1)  # to the last bit, a sum depends on how many threads share it
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    model = ComposerClassifier(network, num_classes=2)
    losses = Losses()
    settings = {"max_duration": "3ep", "save_interval": "1ba", **settings}
    with Trainer(
        model=model,
        train_dataloader=make_loader(num_workers, is_distributed),
        optimizers=optimizer(model.parameters(), lr=0.05),
        callbacks=[losses, *callbacks],
        device="cpu",
        progress_bar=False,
        seed=5,
        run_name="plum",
        **settings,
    ) as trainer:
        trainer.fit()
        weights = {name: value.clone() for name, value in trainer.state.get_model_state_dict().items()}
    return losses.seen, weights


def batches_saved(folder):
    """Return each checkpoint's path by its batch."""
    found = {}
    for name in sorted(os.listdir(folder)):
        match = re.fullmatch(r"ep\d+-ba(\d+)-rank0.pt", name)
        if match:
            found[int(match[1])] = os.path.join(folder, name)
    return found


def assert_same(resumed, expected, where):
    losses, weights = resumed
    all_losses, all_weights = expected
    assert losses == {batch: all_losses[batch] for batch in losses}, where
    assert losses or where == max(all_losses), where
    for name, value in weights.items():
        assert torch.equal(value, all_weights[name]), (where, name)


@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_every_later_loss_is_the_same_to_the_last_bit_wherever_a_run_is_resumed(tmp_path, num_workers, is_distributed):
    folder = str(tmp_path / "checkpoints")
    expected = train(num_workers, is_distributed, save_folder=folder)
    saved = batches_saved(folder)
    assert len(saved) == 18
    # At every batch once; otherwise at the first and the last batch of an epoch and between, since each run takes time.
    stops = [1, 6, 8, 12, 15] if num_workers or is_distributed else saved
    for batch in stops:
        if batch == 18:
            continue
        assert_same(train(num_workers, is_distributed, load_path=saved[batch]), expected, batch)


def test_a_run_that_is_saved_between_epochs_is_resumed_there(tmp_path):
    folder = str(tmp_path / "checkpoints")
    expected = train(save_folder=folder, save_interval="1ep")
    for batch, path in batches_saved(folder).items():
        if batch < 18:
            assert_same(train(load_path=path), expected, batch)


@pytest.mark.parametrize("settings", [{"save_async": True}, {"schedulers": "cosine"}, {"algorithms": "ema"}])
def test_what_else_takes_part_goes_on_as_well(tmp_path, settings):
    from composer.algorithms import EMA
    from composer.optim import CosineAnnealingScheduler

    def made():
        kinds = {"cosine": CosineAnnealingScheduler, "ema": lambda: EMA(half_life="4ba")}
        return {name: kinds[value]() if value in kinds else value for name, value in settings.items()}

    folder = str(tmp_path / "checkpoints")
    expected = train(save_folder=folder, **made())
    plain = {name: value for name, value in settings.items() if not name.startswith("save_")}
    for batch in (3, 6, 10, 17):
        again = {name: value for name, value in made().items() if name in plain}
        assert_same(train(load_path=batches_saved(folder)[batch], **again), expected, batch)


def resume_on_two_ranks(folder):
    """Return this rank's losses, without workers and with two, and how often it was resumed."""
    found = []
    for num_workers, stops in ((0, [2, 3, 5, 8]), (2, [5])):  # there are 3 batches in an epoch
        own = os.path.join(folder, str(num_workers))
        expected = train(num_workers, True, save_folder=own)
        dist.barrier()
        saved = batches_saved(own)
        for batch in stops:
            assert_same(train(num_workers, True, load_path=saved[batch]), expected, batch)
        found.append((expected[0], len(stops)))
    return found


def test_two_ranks_are_resumed_to_the_last_bit(tmp_path):
    folder = str(tmp_path / "checkpoints")
    ranks = run_ranks(resume_on_two_ranks, folder, store=tmp_path / "store", timeout_s=300)
    pairs = list(zip(*ranks, strict=True))
    assert len(pairs) == 2
    for first, second in pairs:
        assert first[0] != second[0]  # each rank has losses of its own
        assert first[1] == second[1]


SCRIPT = """
import os, sys, time
sys.path.insert(0, {folder!r})
from test_module import Callback, train

class Slow(Callback):
    def batch_end(self, state, logger):
        print("batch", int(state.timestamp.batch), flush=True)
        time.sleep(0.02)

for _ in sys.stdin:
    process = os.fork()
    if process == 0:
        train(callbacks=[Slow()], save_folder={folder!r} + "/checkpoints", autoresume=True, save_async={is_async},
              max_duration="8ep")
        os._exit(0)
    print("started", process, flush=True)
    os.waitpid(process, 0)
    print("ended", process, flush=True)
"""


@contextmanager
def starter(tmp_path, is_async):
    """A process that begins, or resumes, the run in a process of its own at each line that it reads.

    They are forked from it, since what they import takes longer than what they do.
    """
    shutil.copyfile(__file__, tmp_path / "test_module.py")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(tmp_path), is_async=is_async))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(script)], **pipes) as process:
        yield process
        process.stdin.close()  # by which it ends


def start(process):
    """Begin or resume the run, and return its process's number."""
    print("go", file=process.stdin, flush=True)
    word, number = process.stdout.readline().split()
    assert word == "started"
    return int(number)


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_a_run_that_is_killed_at_any_instant_loses_at_most_the_save_in_flight(tmp_path, is_async):
    chosen = random.Random(3)
    reached = 0
    with starter(tmp_path, is_async) as process:
        for _ in range(4):
            number, first = start(process), None
            for line in process.stdout:
                batch = int(line.removeprefix("batch "))
                if first is None:
                    # The one that was being saved when the run was killed may be lost, or with it the one before,
                    # which an asynchronous save had yet to begin with.
                    assert reached == 0 or batch >= reached - (1 if is_async else 0), (batch, reached)
                    first = batch
                reached = max(reached, batch)
                if batch >= first + 6:
                    break
            time.sleep(chosen.random() * 0.05)
            os.kill(number, signal.SIGKILL)
            while process.stdout.readline() != f"ended {number}\n":
                pass  # batches that nobody waited for
            whole = list(batches_saved(tmp_path / "checkpoints").values())
            assert whole
            for path in whole:
                verify(path)
    expected, _ = train(max_duration="8ep")
    resumed, _ = train(save_folder=str(tmp_path / "checkpoints"), autoresume=True, max_duration="8ep")
    assert len(resumed) < len(expected) - 15
    assert resumed == {batch: expected[batch] for batch in resumed}


def test_a_run_goes_on_from_the_newest_whole_checkpoint(tmp_path, caplog):
    folder = tmp_path / "checkpoints"
    expected, _ = train(save_folder=str(folder), autoresume=True)
    saved = batches_saved(folder)
    for batch in (18, 17, 16):
        os.unlink(saved[batch])
    with open(saved[15], "rb+") as file:  # newer than what is found, and to be replaced
        file.truncate(1000)
    resumed, _ = train(save_folder=str(folder), autoresume=True)
    assert resumed == {batch: expected[batch] for batch in (15, 16, 17, 18)}
    assert f"Skipped {saved[15]}" in caplog.text
    verify(saved[15])


def test_a_run_that_begins_again_where_checkpoints_are_needs_to_say_so(tmp_path):
    folder = str(tmp_path / "checkpoints")
    settings = {"save_folder": folder, "save_interval": "1ep", "max_duration": "2ep"}
    train(**settings)
    with pytest.raises(FileExistsError, match="may conflict with a future checkpoint"):
        train(**settings)
    train(**settings, save_overwrite=True)


@pytest.mark.parametrize("names", [{}, {"save_filename": "last.pt"}], ids=["a file per save", "one file"])
@pytest.mark.parametrize("save_async", [False, True])
def test_a_run_that_may_overwrite_resumes_from_its_own_checkpoints(tmp_path, names, save_async):
    """Refused as a contradiction, so that one file which each save replaces could not be resumed by itself."""
    settings = {"save_overwrite": True, "autoresume": True, "save_async": save_async, **names}
    expected = train(save_folder=str(tmp_path / "all"), **settings)
    folder = tmp_path / "stopped"
    train(save_folder=str(folder), **settings, max_duration="8ba")
    resumed = train(save_folder=str(folder), **settings)
    assert min(resumed[0]) == 9
    assert_same(resumed, expected, "overwriting")
    assert (len(list(folder.iterdir())) == 2) == bool(names)


def test_algorithms_that_the_weights_depend_on_are_applied_again(tmp_path):
    from composer.algorithms import BlurPool

    def run(**settings):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(4, 16, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        model = ComposerClassifier(network, num_classes=16)
        images = torch.rand(8, 4, 8, 8, generator=torch.Generator().manual_seed(1))
        data = [(images[:4], torch.arange(4)), (images[4:], torch.arange(4))]
        with Trainer(
            model=model,
            train_dataloader=data,
            device_train_microbatch_size=4,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            device="cpu",
            progress_bar=False,
            **settings,
        ) as trainer:
            if trainer.state.timestamp < trainer.state.max_duration:
                trainer.fit()
            return {name: value.clone() for name, value in trainer.state.model.state_dict().items()}

    saved = run(algorithms=BlurPool(min_channels=4), save_folder=str(tmp_path), max_duration="1ep")
    with pytest.warns(UserWarning, match="Automatically adding required_on_load algorithm BlurPool"):
        loaded = run(load_path=str(tmp_path / "latest-rank0.pt"), max_duration="1ep")
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    with pytest.raises((RuntimeError, KeyError)):
        run(
            load_path=str(tmp_path / "latest-rank0.pt"),
            load_exclude_algorithms=["BlurPool"],
            load_weights_only=True,
            max_duration="1ep",
        )


def test_a_checkpoint_of_an_average_warns_where_ema_is_left_out(tmp_path):
    from composer.algorithms import EMA

    ema, path = "The model in the checkpoint is the average of EMA", str(tmp_path / "latest-rank0.pt")
    train(algorithms=EMA(half_life="2ba"), save_folder=str(tmp_path), save_interval="1ep", max_duration="1ep")
    with pytest.warns(UserWarning, match=rf"{ema}.* algorithms=\[EMA\(half_life='2ba'"):
        train(load_path=path, max_duration="2ep")
    # Neither warns: the filters make an error of it.
    train(algorithms=EMA(half_life="2ba"), load_path=path, max_duration="2ep")
    train(load_path=path, load_weights_only=True, max_duration="1ep")
