"""Garbage collection after the same batches on all ranks."""

import gc

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, Trainer
from composer.callbacks import ScheduledGarbageCollector
from composer.models import ComposerClassifier
from composer.utils import dist
from composer_dist.testing import run_ranks

NUM_BATCHES = 12


class Litter(Callback):
    """Leave cyclic garbage after each batch, and record the batch and event of each collection."""

    def __init__(self, amount, fail_at=None):
        self.amount, self.fail_at = amount, fail_at
        self.now = ("", -1)
        self.collections = []

    def run_event(self, event, state, logger):
        if event.value == "fit_end":
            gc.callbacks.remove(self.note)
        self.now = (event.value, state.timestamp.num_batches)
        if event.value == "fit_start":
            gc.callbacks.append(self.note)
        if event.value == "batch_start":
            for _ in range(self.amount):
                cycle = []
                cycle.append(cycle)
            if state.timestamp.num_batches == self.fail_at:
                raise RuntimeError("full")

    def note(self, phase, info):
        if phase == "start":
            self.collections.append((*self.now, info["generation"]))


def train(litter, *callbacks, folder=None, fits=1):
    """Train for 12 batches with an evaluation every 5 and a save every 8."""
    dataset = TensorDataset(torch.randn(64, 2), torch.zeros(64, dtype=torch.long))
    model = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
    loader = DataLoader(dataset, 2, sampler=dist.get_sampler(dataset))
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        eval_dataloader=DataLoader(dataset, 32, sampler=dist.get_sampler(dataset)),
        eval_interval="5ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration=f"{NUM_BATCHES}ba",
        callbacks=[litter, *callbacks],
        save_folder=folder,
        save_interval="8ba",
        device="cpu",
        progress_bar=False,
    )
    for _ in range(fits):
        trainer.fit(duration=f"{NUM_BATCHES // fits}ba")
    trainer.close()
    return litter.collections


def collect_on_ranks(folder, is_scheduled):
    gc.enable()
    litter = Litter(amount=3000 * (1 + 2 * dist.get_global_rank()))
    collections = train(litter, *[ScheduledGarbageCollector(4)] * is_scheduled, folder=folder)
    return collections, gc.isenabled()


def test_ranks_collect_after_the_same_batches_and_only_there(tmp_path):
    ranks = run_ranks(collect_on_ranks, str(tmp_path / "run"), True, store=tmp_path / "store")
    assert ranks[0] == ranks[1]
    collections, is_enabled = ranks[0]
    assert is_enabled
    assert collections == [
        ("fit_start", 0, 2),
        ("batch_end", 4, 1),
        ("eval_before_all", 5, 2),
        ("eval_after_all", 5, 2),
        ("batch_end", 8, 1),
        ("batch_checkpoint", 8, 2),  # before the save
        ("batch_start", 8, 2),  # after it
        ("eval_before_all", 10, 2),
        ("eval_after_all", 10, 2),
        ("batch_end", 12, 1),
        ("batch_checkpoint", 12, 2),
    ]


def test_ranks_without_it_collect_at_batches_of_their_own(tmp_path):
    ranks = run_ranks(collect_on_ranks, str(tmp_path / "run"), False, store=tmp_path / "store")
    assert ranks[0] != ranks[1]


@pytest.fixture
def automatic():
    yield
    gc.enable()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_setting_from_before_is_restored(automatic, is_enabled):
    (gc.enable if is_enabled else gc.disable)()
    train(Litter(1), ScheduledGarbageCollector(), fits=2)
    assert gc.isenabled() == is_enabled


def test_it_is_restored_by_an_error_without_close(automatic):
    collector, litter = ScheduledGarbageCollector(), Litter(1, fail_at=3)
    try:
        with pytest.raises(RuntimeError, match="full") as raised:
            train(litter, collector)
        assert gc.isenabled()
        assert raised.tb is not None  # which keeps the Trainer, so that nothing has closed it
    finally:
        gc.callbacks.remove(litter.note)


@pytest.mark.parametrize(("name", "value"), [("batch_interval", 0), ("generation", 3), ("generation", -1)])
def test_a_number_that_cannot_be_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value} must be"):
        ScheduledGarbageCollector(**{name: value})
