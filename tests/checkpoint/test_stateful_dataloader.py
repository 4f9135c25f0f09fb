"""torchdata's StatefulDataLoader is resumed through its own state, to the last bit."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from composer import Callback, Trainer
from composer.models import ComposerClassifier

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
