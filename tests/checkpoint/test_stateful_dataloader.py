"""torchdata's StatefulDataLoader is resumed through its own state, to the last bit, or read again where that fails."""

import os
import random
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from composer import Callback, Trainer
from composer.models import ComposerClassifier, ComposerModel
from composer.utils import dist
from composer_dist.testing import run_ranks

torchdata = pytest.importorskip("torchdata.stateful_dataloader")
StatefulDataLoader = torchdata.StatefulDataLoader

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it

NUM_POINTS, BATCH_SIZE = 12, 3


class Points(Dataset):
    """Points in two classes, moved by noise, that counts how often it is asked for one in this process."""

    def __init__(self, noise):
        self.points = torch.randn(NUM_POINTS, 2, generator=torch.Generator().manual_seed(0))
        self.noise = noise
        self.num_asked = 0

    def __len__(self):
        return NUM_POINTS

    def __getitem__(self, index):
        self.num_asked += 1
        noise = self.noise * torch.randn(2) if self.noise else 0
        return self.points[index] + noise, (self.points[index].sum() > 0).long()


class Losses(Callback):
    def __init__(self):
        self.seen = {}

    def batch_end(self, state, logger):
        self.seen[int(state.timestamp.batch)] = float(state.loss.detach()).hex()


def train(dataset, num_workers, **settings):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ComposerClassifier(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 2)), num_classes=2)
    losses = Losses()
    with Trainer(
        model=model,
        train_dataloader=StatefulDataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=num_workers),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.05),
        callbacks=[losses],
        device="cpu",
        progress_bar=False,
        max_duration="3ep",
        seed=5,
        run_name="plum",
        **settings,
    ) as trainer:
        trainer.fit()
    return losses.seen


@pytest.mark.parametrize(("num_workers", "noise"), [(0, 0), (0, 0.1), (2, 0)])
@pytest.mark.parametrize("save_interval", ["1ba", "1ep"])
def test_a_run_goes_on_to_the_last_bit(tmp_path, num_workers, noise, save_interval):
    expected = train(Points(noise), num_workers, save_folder=str(tmp_path), save_interval=save_interval)
    names = ["ep0-ba2", "ep0-ba4", "ep1-ba5"] if save_interval == "1ba" else ["ep1-ba4"]
    for name in names:
        dataset, batch = Points(noise), int(name.split("ba")[1])
        resumed = train(dataset, num_workers, load_path=os.path.join(tmp_path, f"{name}-rank0.pt"))
        assert resumed == {number: expected[number] for number in range(batch + 1, 13)}, name
        if num_workers == 0:
            assert dataset.num_asked == (12 - batch) * BATCH_SIZE


class Seen(Callback):
    """Keeps the numbers of the samples of each batch."""

    def __init__(self):
        self.batches = {}

    def batch_start(self, state, logger):
        self.batches[int(state.timestamp.batch)] = state.batch.tolist()


class Mean(ComposerModel):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        return self.scale * batch.float().mean()

    def loss(self, outputs, batch):
        return outputs


class Shuffled:
    """A sampler with a generator of its own."""

    def __init__(self):
        self.rng = random.Random(3)

    def __iter__(self):
        return iter(self.rng.sample(range(NUM_POINTS), NUM_POINTS))

    def __len__(self):
        return NUM_POINTS


class WithState(Shuffled):
    def state_dict(self):
        return {"rng": self.rng.getstate()}

    def load_state_dict(self, state):
        version, internal, gauss = state["rng"]
        self.rng.setstate((version, tuple(internal), gauss))


class Noisy(Dataset):
    def __init__(self):
        self.rng = random.Random(3)

    def __len__(self):
        return NUM_POINTS

    def __getitem__(self, index):
        return index + self.rng.random()


class Stream(IterableDataset):
    def __init__(self):
        self.inner = Shuffled()

    def __iter__(self):
        return iter(self.inner)


class ByEpoch(Dataset):
    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return NUM_POINTS

    def __getitem__(self, index):
        return index + 100 * self.epoch


def distributed(**workers):
    sampler = torchdata.sampler.StatefulDistributedSampler(range(NUM_POINTS), num_replicas=1, rank=0)
    return DataLoader(range(NUM_POINTS), BATCH_SIZE, sampler=sampler, **workers)


def seeded_generator():
    return torch.Generator().manual_seed(3)


HOLDERS = {
    "sampler": lambda **workers: StatefulDataLoader(range(NUM_POINTS), BATCH_SIZE, sampler=Shuffled(), **workers),
    "sampler with state": lambda **workers: StatefulDataLoader(
        range(NUM_POINTS), BATCH_SIZE, sampler=WithState(), **workers
    ),
    "loader": lambda **workers: StatefulDataLoader(
        range(NUM_POINTS), BATCH_SIZE, shuffle=True, generator=seeded_generator(), **workers
    ),
    "dataset": lambda **workers: StatefulDataLoader(Noisy(), BATCH_SIZE, shuffle=True, **workers),
    "iterable dataset": lambda **workers: StatefulDataLoader(Stream(), BATCH_SIZE, **workers),
    "torchdata's sampler in torch's loader": distributed,
}


def read(loader, **settings):
    model, seen = Mean(), Seen()
    with Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
        callbacks=[seen],
        device="cpu",
        progress_bar=False,
        max_duration="3ep",
        train_subset_num_batches=NUM_POINTS // BATCH_SIZE,  # which no iterable dataset says
        seed=5,
        run_name="plum",
        **settings,
    ) as trainer:
        trainer.fit()
    return seen.batches


@pytest.mark.parametrize(
    ("holder", "num_workers"), [*((holder, 0) for holder in HOLDERS), ("sampler", 1), ("dataset", 1)]
)
def test_generators_are_not_drawn_from_once_more(tmp_path, holder, num_workers):
    """Resumed runs had other orders and noise, and an epoch resumed by torchdata's sampler could be empty."""
    make = HOLDERS[holder]
    every = {"save_filename": "ba{batch}.pt", "save_latest_filename": None}
    expected = read(make(num_workers=num_workers), save_folder=str(tmp_path), save_interval="1ba", **every)
    for stop in (2, 4, 6):
        torch.manual_seed(99)
        resumed = read(make(num_workers=num_workers), load_path=str(tmp_path / f"ba{stop}.pt"))
        assert resumed == {number: expected[number] for number in range(stop, 12)}, stop


def test_workers_that_persist_and_do_not_learn_of_the_epoch_are_named_once():
    """Every epoch was read as the first one."""
    with pytest.warns(UserWarning, match="set_epoch") as warned:
        batches = read(StatefulDataLoader(ByEpoch(), BATCH_SIZE, num_workers=1, persistent_workers=True))
    assert batches[0] == batches[4] == batches[8]
    (message,) = [str(warning.message) for warning in warned if "set_epoch" in str(warning.message)]
    assert message.startswith("train_dataloader.dataset defines set_epoch")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*set_epoch")
        batches = read(StatefulDataLoader(ByEpoch(), BATCH_SIZE, num_workers=1))
    assert [batches[first][0] for first in (0, 4, 8)] == [0, 100, 200]


def read_share(batch_size, settings):
    """Train on this rank's share of the numbers up to 24, and return those of each batch."""
    model, seen = Mean(), Seen()
    sampler = dist.get_sampler(range(24), shuffle=True, seed=3)
    with Trainer(
        model=model,
        train_dataloader=StatefulDataLoader(range(24), batch_size, sampler=sampler),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
        callbacks=[seen],
        device="cpu",
        progress_bar=False,
        max_duration="2ep",
        seed=5,
        run_name="plum",
        **settings,
    ) as trainer:
        trainer.fit()
    return seen.batches


@pytest.mark.filterwarnings("ignore:the random state of 1 ranks:UserWarning")
def test_more_ranks_finish_an_epoch_by_its_batches(tmp_path):
    whole = read_share(4, {"save_folder": str(tmp_path), "save_interval": "1ba"})
    first, second = run_ranks(
        read_share, 2, {"load_path": str(tmp_path / "ep0-ba2-rank0.pt")}, store=tmp_path / "store", timeout_s=120
    )
    together = {number: sorted(first[number] + second[number]) for number in first}
    assert together == {number: sorted(whole[number]) for number in range(2, 12)}
