"""A signal ends a training on all ranks after the same batch, with a checkpoint from which it goes on bit by bit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, Trainer
from composer.models import ComposerModel
from composer.utils import dist
from composer_dist.testing import run_ranks

SCRIPT = Path(__file__).with_name("preempted_script.py")
START_S = 150  # interpreters that import torch on a busy machine
LAST = 100  # batches: more than are trained on while the ranks of a busy machine talk


class Signalled(Callback):
    """Send this process a signal in the middle of a batch, and write down every loss."""

    def __init__(self, signum, ranks, at):
        self.signum, self.ranks, self.at = signum, ranks, at
        self.losses = []

    def after_loss(self, state, logger):
        if self.signum and dist.get_global_rank() in self.ranks and int(state.timestamp.batch) == self.at:
            os.kill(os.getpid(), self.signum)

    def batch_end(self, state, logger):
        self.losses.append(state.total_loss_dict["loss/train/total"].item())
        if self.signum and int(state.timestamp.batch) > self.at:
            time.sleep(0.1)  # so that there are batches left while the ranks talk


def train(folder, signum=None, ranks=(), at=2, **settings):
    """Train until the end or a signal; return the exit status, the last batch, the losses and the weights."""
    torch.manual_seed(5)
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2))
    model = ComposerModel.from_module(network, nn.functional.cross_entropy)
    points = torch.randn(64, 4)
    dataset = TensorDataset(points, (points.sum(dim=1) > 0).long())
    callback = Signalled(signum, ranks, at)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset, shuffle=True)),
        max_duration=f"{LAST}ba",
        optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
        callbacks=callback,
        seed=3,
        device="cpu",
        progress_bar=False,
        save_folder=None if folder is None else str(folder),
        save_filename="ba{batch}.pt",
        save_interval="1000ba",
        **settings,
    )
    status = 0
    try:
        trainer.fit()
    except SystemExit as leave:
        status = leave.code
    trainer.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    weights = [parameter.detach() for parameter in model.parameters()]
    return status, int(trainer.state.timestamp.batch), callback.losses, weights


@pytest.mark.parametrize(
    ("signum", "status", "ranks"),
    [
        (signal.SIGTERM, 143, (0,)),
        (signal.SIGTERM, 143, (1,)),
        (signal.SIGTERM, 143, (0, 1)),
        (signal.SIGUSR1, 143, (1,)),
        (signal.SIGINT, 130, (1,)),
    ],
    ids=str,
)
def test_all_ranks_stop_after_the_same_batch(tmp_path, signum, status, ranks):
    results = run_ranks(train, tmp_path / "checkpoints", signum, ranks, store=tmp_path / "store")
    assert [result[0] for result in results] == [status, status]
    stopped = {result[1] for result in results}
    assert len(stopped) == 1
    assert 3 <= stopped.pop() < LAST


def test_what_is_left_to_train_is_the_same_to_the_last_bit(tmp_path):
    folder = tmp_path / "checkpoints"
    whole = run_ranks(train, tmp_path / "whole", store=tmp_path / "a")
    first = run_ranks(train, folder, signal.SIGTERM, (1,), store=tmp_path / "b")
    stopped = first[0][1]
    second = run_ranks(resume, folder, stopped, store=tmp_path / "c")
    for rank in (0, 1):
        assert first[rank][2] + second[rank][2] == whole[rank][2]
        for got, expected in zip(second[rank][3], whole[rank][3], strict=True):
            assert torch.equal(got, expected)


def resume(folder, batch):
    return train(folder, load_path=str(folder / f"ba{batch}.pt"))


def test_a_signal_during_the_last_batch_lets_training_end_first(tmp_path):
    results = run_ranks(train, None, signal.SIGTERM, (0, 1), LAST - 1, store=tmp_path / "store")
    assert [result[:2] for result in results] == [(143, LAST), (143, LAST)]


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["launcher", "rank 1"])
def test_the_launcher_ends_with_the_status_of_the_signal(tmp_path, whom):
    command = [sys.executable, "-m", "composer", "-n", "2", str(SCRIPT), str(tmp_path), "400"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            wait_until_it_trains(launcher, tmp_path)
            os.kill(launcher.pid if whom == "launcher" else process_of_rank(1, tmp_path), signal.SIGTERM)
            out, err = launcher.communicate(timeout=START_S)
        finally:
            launcher.terminate()
    assert launcher.returncode == 143, out + err
    assert "failed first" not in err
    assert "trained to the end" not in out
    of_ranks = [(tmp_path / f"losses-rank{rank}.txt").read_text().splitlines() for rank in (0, 1)]
    last = of_ranks[0][-1].split()[0]
    assert of_ranks[1][-1].split()[0] == last
    assert (tmp_path / "checkpoints" / f"ba{last}.pt").is_file()


def wait_until_it_trains(launcher, folder):
    deadline = time.monotonic() + START_S
    while not all((folder / f"losses-rank{rank}.txt").exists() for rank in (0, 1)):
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def process_of_rank(rank, folder_of_run):
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # By the folder of the test, since others run the same script at the same time.
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            is_ours = str(SCRIPT).encode() in arguments and str(folder_of_run).encode() in arguments
            if is_ours and f"RANK={rank}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                return int(folder.name)
        except OSError:
            continue  # gone meanwhile, or somebody else's
    raise AssertionError(f"no rank {rank}")
