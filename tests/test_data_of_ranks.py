"""Place in the data of several ranks: it counts shares of the data, and resumes with another number of ranks."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, Dataset

from composer import Callback, Trainer
from composer.models import ComposerModel
from composer.optim import Schedule
from composer_dist import dist
from composer_dist.testing import run_ranks

BATCH, LENGTH = 8, 40
SPLIT = {"net.0": ColwiseParallel(), "net.2": RowwiseParallel()}


class Noisy(Dataset):
    def __init__(self, noise):
        self.points, self.noise = torch.randn(LENGTH, 3, generator=torch.Generator().manual_seed(0)), noise

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return self.points[index] + self.noise * torch.rand(3)


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 1))

    def forward(self, batch):
        return self.net(batch)

    def loss(self, outputs, batch):
        return (outputs - batch.sum(1, keepdim=True)).square().mean()


class Batches(Callback):
    """Keep the sum of each batch of this rank."""

    def __init__(self):
        self.sums = []

    def batch_start(self, state, logger):
        self.sums.append(float(state.batch.double().sum()))


def grow(state):
    return 2 if state.timestamp.batch < 3 else 5 if state.timestamp.batch < 5 else 8


def train(degree=1, noise=1.0, **settings):
    """Return the batches of this rank, and the weights."""
    warnings.simplefilter("ignore")
    torch.manual_seed(11)
    model, data = Model(), Noisy(noise)
    num_shares = dist.get_world_size() // degree
    sampler = dist.get_sampler(data, shuffle=True, num_replicas=num_shares, rank=dist.get_global_rank() // degree)
    if degree > 1:
        settings["parallelism_config"] = {"tp": {"tensor_parallel_degree": degree, "layer_plan": SPLIT}, "fsdp": {}}
    with Trainer(
        model=model,
        train_dataloader=DataLoader(data, BATCH // num_shares, sampler=sampler),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="2ep",
        callbacks=(batches := Batches()),
        seed=5,
        device="cpu",
        progress_bar=False,
        **settings,
    ) as trainer:
        trainer.fit()
        weights = trainer.strategy.model_state_dict(trainer.state.model)
    return batches.sums, {name: value.clone() for name, value in weights.items()}


def train_on_two_ranks(folder):
    saves = {"save_interval": "1ba", "save_filename": "{batch}.pt", "save_latest_filename": None}
    split = train(2, save_folder=folder / "split", **saves)
    schedule = {"schedulers": Schedule("batch_size", grow, absolute=True), "noise": 0.0}
    divided = train(save_folder=folder / "divided", **saves, **schedule)
    resumed = train(load_path=folder / "divided" / "6.pt", **schedule)
    return split, divided, resumed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def on_two_ranks(folder):
    return run_ranks(train_on_two_ranks, folder, store=folder / "store", timeout_s=120)


def close(weights, others):
    for name in weights:
        torch.testing.assert_close(weights[name], others[name])


def test_ranks_that_split_tensors_share_their_data_with_a_single_process(folder, on_two_ranks):
    (first, weights), (second, _) = (each[0] for each in on_two_ranks)
    batches, alone = train()
    assert first == second == batches
    close(weights, alone)
    rest, resumed = train(load_path=folder / "split" / "3.pt")
    assert rest == batches[3:]
    close(resumed, alone)


def test_a_scheduled_batch_size_counts_the_samples_of_all_ranks(folder, on_two_ranks):
    schedule = {"schedulers": Schedule("batch_size", grow, absolute=True), "noise": 0.0}
    batches, alone = train(**schedule)
    (first, weights), (second, _) = (each[1] for each in on_two_ranks)
    assert [one + other for one, other in zip(first, second, strict=True)] == pytest.approx(batches)
    close(weights, alone)
    for each, of_rank in zip(on_two_ranks, (first, second), strict=True):
        rest, resumed = each[2]
        assert rest == of_rank[6:]
        assert all(torch.equal(resumed[name], weights[name]) for name in weights)
    rest, resumed = train(load_path=folder / "divided" / "6.pt", **schedule)
    assert rest == batches[6:]
    close(resumed, alone)
