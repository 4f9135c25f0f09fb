"""Losses by name: logged as means over the ranks, whatever names each rank's model returns."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.loggers import LoggerDestination
from composer.models import ComposerModel
from composer.utils import dist
from composer_dist.testing import run_ranks


class Losses(LoggerDestination):
    """The losses that are logged, by name."""

    def __init__(self):
        self.seen = {}

    def log_metrics(self, metrics, step=None):
        for name, value in metrics.items():
            if name.startswith("loss/train/"):
                self.seen.setdefault(name.removeprefix("loss/train/"), []).append(float(value))


class Named(ComposerModel):
    """Returns the losses that are asked for, of which the value is known."""

    def __init__(self, names_of_batches):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.names_of_batches = iter(names_of_batches)

    def forward(self, batch):
        return self.weight * batch[0].sum()

    def loss(self, outputs, batch):
        value = 1.0 + 2.0 * dist.get_global_rank()  # 1 and 3: their mean is 2
        values = outputs * 0 + value
        named = {name.lower(): values.double() if name.isupper() else values for name in next(self.names_of_batches)}
        return {"total": values} | named


def train(names_of_ranks):
    names = names_of_ranks[dist.get_global_rank()]
    data = TensorDataset(torch.zeros(4 * len(names), 1))
    model = Named(names)
    log = Losses()
    with Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=2, sampler=dist.get_sampler(data)),
        max_duration="1ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        loggers=log,
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    return log.seen


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "seen_by_rank_0"),
    [
        (["a", "a", "a"], ["a", "a", "a"], {"a": [2, 2, 2]}),
        (["a", "a", "a"], ["b", "b", "b"], {"a": [1, 1, 1], "b": [3, 3, 3]}),
        (["", "", ""], ["a", "", "a"], {"a": [3, 3]}),
        (["a", "a", "a"], ["a", "", "a"], {"a": [2, 1, 2]}),
        # Upper case for float64, which the other rank may not have.
        (["a", "a", "a"], ["A", "a", "A"], {"a": [2, 2, 2]}),
        (["", "", ""], ["A", "A", ""], {"a": [3, 3]}),
        (["a", "a", "aB"], ["a", "aB", "B"], {"a": [2, 2, 1], "b": [2]}),
        # A name that comes late has to be compared first.
        (["", "a", "a"], ["", "a", "a"], {"a": [1, 2]}),
        (["", "", "a"], ["", "a", "a"], {"a": [2]}),
        (["ab", "b", ""], ["b", "a", "ab"], {"a": [1, 3, 3], "b": [2, 1, 3]}),
    ],
)
def test_losses_are_means_over_the_ranks_that_have_them(tmp_path, of_rank_0, of_rank_1, seen_by_rank_0):
    seen = run_ranks(train, [of_rank_0, of_rank_1], store=tmp_path / "store")

    assert seen[0] == {**seen_by_rank_0, "total": [2, 2, 2]}
    assert seen[1]["total"] == [2, 2, 2]


class OfLarge(ComposerModel):
    """Returns the mean of the batch's values, and a loss of only those that are larger than 2, if there are any."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, batch):
        return batch + self.weight * 0

    def loss(self, outputs, batch):
        large = outputs[batch > 2]
        return {"total": outputs.mean(), "all": outputs.mean()} | ({"large": large.mean()} if len(large) else {})


def train_unevenly(parts, microbatch_sizes):
    seen = []
    for size in microbatch_sizes:
        model, log = OfLarge(), Losses()
        batches = torch.arange(7.0, dtype=torch.float64).split(parts)
        with Trainer(
            model=model,
            train_dataloader=[batches[dist.get_global_rank()]],
            device_train_microbatch_size=size,
            max_duration="1ba",
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            loggers=log,
            device="cpu",
            progress_bar=False,
        ) as trainer:
            trainer.fit()
        seen.append({name: values[0] for name, values in log.seen.items()})
    return seen


@pytest.mark.parametrize("parts", [[7], [3, 4], [1, 6], [6, 1]], ids=lambda parts: "+".join(map(str, parts)))
def test_losses_weigh_by_the_samples_of_the_parts_that_have_them(tmp_path, parts):
    """A loss that not every microbatch or rank has was off by the share of those that have it: 7.71 instead of 4.5."""
    for seen in run_ranks(train_unevenly, parts, (7, 1), store=tmp_path / "store", world_size=len(parts), timeout_s=60):
        values = torch.arange(7.0).split(parts)
        with_large = torch.cat([part for part in values if part.max() > 2])
        # A part's loss weighs by all samples of the part.
        large = sum(len(part) * part[part > 2].mean() for part in values if part.max() > 2) / len(with_large)
        uncut = {"total": 3.0, "all": 3.0, "large": float(large)}
        cut = {"total": 3.0, "all": 3.0, "large": 4.5}
        assert [pytest.approx(uncut), pytest.approx(cut)] == seen
