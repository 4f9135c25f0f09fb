"""Ranks with different numbers of batches train the same epochs, and the one that had more says so."""

import warnings

import pytest
import torch
from torch import nn

from composer import Trainer
from composer.models import ComposerClassifier
from composer_dist import get_global_rank
from composer_dist.testing import run_ranks


class Batches:
    """As many batches as are asked for, without or with a length."""

    batch_size = 2

    def __init__(self, number):
        self.number = number

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.number)
        for _ in range(self.number):
            yield torch.randn(2, 4, generator=generator), torch.randint(3, (2,), generator=generator)


class SizedBatches(Batches):
    def __len__(self):
        return self.number


def train(kind, numbers):
    """Train two epochs, and return how many batches there were, the weights, and what was warned of."""
    torch.manual_seed(3)
    model = ComposerClassifier(nn.Linear(4, 3), num_classes=3)
    with (
        warnings.catch_warnings(record=True) as caught,
        Trainer(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            train_dataloader=kind(numbers[get_global_rank()]),
            max_duration="7ba" if kind is Batches else "2ep",
            device="cpu",
            progress_bar=False,
        ) as trainer,
    ):
        warnings.simplefilter("always")
        trainer.fit()
    told = [str(warning.message) for warning in caught if "not trained on" in str(warning.message)]
    weight = next(model.parameters()).detach().clone()
    return int(trainer.state.timestamp.batch), int(trainer.state.timestamp.epoch), weight, told


@pytest.mark.parametrize(
    ("kind", "batches", "warning"),
    [
        (Batches, 7, "Another rank had no batch left after 3, so epoch 0 ends there on all ranks"),
        (SizedBatches, 6, "train_dataloader has 5 batches on global rank 1 and 3 on another one"),
    ],
)
def test_an_epoch_ends_with_the_rank_that_has_fewest_batches_and_the_other_one_warns_once(
    kind, batches, warning, tmp_path
):
    ranks = run_ranks(train, kind, [3, 5], store=tmp_path / "store")
    assert [rank[:2] for rank in ranks] == [(batches, 2)] * 2
    assert torch.equal(ranks[0][2], ranks[1][2])
    assert ranks[0][3] == []
    (told,) = ranks[1][3]
    assert told.startswith(warning)


def test_ranks_with_as_many_batches_are_not_warned(tmp_path):
    ranks = run_ranks(train, SizedBatches, [3, 3], store=tmp_path / "store")
    assert [rank[3] for rank in ranks] == [[], []]
