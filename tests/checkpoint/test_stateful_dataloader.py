"""torchdata's StatefulDataLoader is resumed through its own state, to the last bit."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from composer import Callback, Trainer
from composer.models import ComposerClassifier, ComposerModel
from composer.utils import dist
from composer_dist.testing import run_ranks

StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

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
