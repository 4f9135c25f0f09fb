"""A signal that arrives between batches: the next and the last checkpoint are complete."""

import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, Trainer
from composer.models import ComposerClassifier
from composer_checkpoint import find_newest


class Signalled(Callback):
    """Sends this process signals at one moment, once."""

    def __init__(self, moment, signum, times, batch):
        self.moment, self.signum, self.times, self.batch = moment, signum, times, batch
        self.ended = 0

    def reach(self, moment, batch=0):
        if moment == self.moment and batch >= self.batch:
            self.moment = None
            for _ in range(self.times):
                os.kill(os.getpid(), self.signum)

    def fit_start(self, state, logger):
        self.reach("start")

    def eval_batch_end(self, state, logger):
        self.reach("evaluation", int(state.timestamp.batch))

    def batch_end(self, state, logger):
        self.ended = int(state.timestamp.batch)

    def state_dict(self):  # which is asked for in the middle of a save
        self.reach("save", self.ended)
        return {}


def train(folder, moment, signum, times=1, batch=0, **settings):
    """Train until a signal, and return the status, the last batch and what is in the folder."""
    torch.manual_seed(0)
    signalled = Signalled(moment, signum, times, batch)

    def compile_slowly(module, inputs):
        signalled.reach("compile")
        return module.forward

    model = ComposerClassifier(nn.Linear(2, 2), num_classes=2)
    data = TensorDataset(torch.randn(16, 2), torch.zeros(16, dtype=torch.long))
    with (
        Trainer(
            model=model,
            train_dataloader=DataLoader(data, batch_size=4),
            eval_dataloader=DataLoader(data, batch_size=4),
            eval_interval="2ba",
            optimizers=torch.optim.AdamW(model.parameters()),
            max_duration="40ba",
            device="cpu",
            progress_bar=False,
            callbacks=[signalled],
            save_folder=str(folder),
            save_filename="ba{batch}.pt",
            save_latest_filename=None,
            save_interval="3ba",
            compile_config={"backend": compile_slowly} if moment == "compile" else None,
            **settings,
        ) as trainer,
        pytest.raises((SystemExit, KeyboardInterrupt)) as leave,
    ):
        trainer.fit()
    return getattr(leave.value, "code", None), int(trainer.state.timestamp.batch), sorted(os.listdir(folder))


@pytest.mark.parametrize(
    ("moment", "batch", "settings"),
    [
        ("start", 1, {}),
        ("compile", 1, {}),
        ("evaluation", 2, {}),
        ("save", 3, {}),
        ("save", 3, {"save_async": True}),
    ],
    ids=["before-the-first-batch", "while-compiling", "while-evaluating", "while-saving", "while-saving-async"],
)
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_training_ends_with_a_checkpoint_of_the_next_boundary(tmp_path, moment, batch, settings, signum, status):
    left = train(tmp_path, moment, signum, **settings)
    assert left == (status, batch, [f"ba{batch}.pt"])
    found = find_newest(tmp_path)
    assert (found.path.name, found.skipped) == (f"ba{batch}.pt", ())


@pytest.mark.parametrize("moment", ["save", "evaluation"])
def test_a_second_interrupt_leaves_the_checkpoint_before_as_it_was(tmp_path, moment):
    assert train(tmp_path, moment, signal.SIGINT, times=2, batch=6) == (None, 6, ["ba3.pt"])
    found = find_newest(tmp_path)
    assert (found.path.name, found.skipped) == ("ba3.pt", ())
