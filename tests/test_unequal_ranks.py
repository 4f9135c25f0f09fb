"""Ranks with different numbers of batches train the same epochs, and the one that had more says so."""

import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, Subset, TensorDataset

from composer import Callback, Trainer
from composer.models import ComposerClassifier
from composer_dist import dist, get_global_rank
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


class Alternating(Sampler):
    """Shards by itself, as torchvision's RASampler and timm's RepeatAugSampler do."""

    def __init__(self, dataset):
        self.num_replicas, self.rank = dist.get_world_size(), get_global_rank()
        self.length, self.epochs = len(dataset), []

    def __len__(self):
        return self.length // self.num_replicas

    def __iter__(self):
        return iter(range(self.rank, self.length, self.num_replicas))

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def train_on_own(kind):
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.randn(16, 4, generator=generator), torch.randint(3, (16,), generator=generator))
    expected = 6
    if kind == "subset":
        own = Subset(dataset, range(6)) if get_global_rank() == 0 else TensorDataset(*dataset[6:16])
        sampler = dist.get_sampler(own, shuffle=True, num_replicas=1, rank=0)
        loader = DataLoader(own, 2, sampler=sampler)
    else:
        sampler, expected = Alternating(dataset), 8
        batches = BatchSampler(sampler, 2, drop_last=True)
        loader = (
            DataLoader(dataset, batch_sampler=batches) if "batch" in kind else DataLoader(dataset, 2, sampler=sampler)
        )
    torch.manual_seed(3)
    model = ComposerClassifier(nn.Linear(4, 3), num_classes=3)
    with (
        warnings.catch_warnings(action="ignore"),
        Trainer(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            train_dataloader=loader,
            max_duration="2ep",
            device="cpu",
            progress_bar=False,
        ) as trainer,
    ):
        trainer.fit()
    weight = next(model.parameters()).detach().clone()
    assert getattr(sampler, "epochs", [0, 1]) == [0, 1]
    return int(trainer.state.timestamp.batch), int(trainer.state.timestamp.sample), expected, weight


@pytest.mark.parametrize("kind", ["subset", "sampler", "batch sampler"])
def test_ranks_may_have_data_of_their_own_or_a_sampler_that_shards_by_itself(kind, tmp_path):
    """Seen before: "each of the 2 ranks would read every sample", or that the ranks do not agree on what to train."""
    first, second = run_ranks(train_on_own, kind, store=tmp_path / "store")
    assert first[0] == second[0] == first[2]
    assert first[1] == second[1] == 4 * first[2]
    assert torch.equal(first[3], second[3])


class Numbers(Dataset):
    """Samples that are their own numbers; on one rank it ends before its length."""

    def __init__(self, length, ending_rank=None):
        self.length, self.ending_rank = length, ending_rank

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if get_global_rank() == self.ending_rank and index >= 4:
            raise StopIteration
        return torch.tensor([float(index)] * 4), index % 3


def make_trainer(**settings):
    model = ComposerClassifier(nn.Linear(4, 3), num_classes=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"max_duration": "2ep", "device": "cpu", "progress_bar": False, "dist_timeout": 60, **settings}
    return Trainer(model=model, optimizers=optimizer, **settings)


def end_one_rank_early(call, num_workers):
    dataset = Numbers(12, ending_rank=1)
    loader = DataLoader(dataset, 2, sampler=dist.get_sampler(dataset), num_workers=num_workers)
    whole = Numbers(12)
    train_loader = DataLoader(whole, 2, sampler=dist.get_sampler(whole))
    with make_trainer() as trainer:
        if call == "fit":
            trainer.fit(train_dataloader=loader)
        elif call == "evaluation in fit":
            trainer.fit(train_dataloader=train_loader, eval_dataloader=loader)
        else:
            getattr(trainer, call)(loader)


@pytest.mark.parametrize(
    ("call", "num_workers"), [("fit", 0), ("fit", 2), ("evaluation in fit", 0), ("eval", 0), ("predict", 2)]
)
def test_a_stop_iteration_of_one_ranks_dataset_is_an_error_that_names_it(call, num_workers, tmp_path):
    """That rank began its next epoch among the batches of the others, and at the end each waited for the other."""
    begin = time.monotonic()
    with pytest.raises(Exception, match=r"StopIteration of .*Numbers has ended .* on global rank 1") as error:
        run_ranks(end_one_rank_early, call, num_workers, store=tmp_path / "store")
    assert "after 1 of its 3 batches" in str(error.value)
    assert time.monotonic() - begin < 50  # before the ranks give each other up


class Samples(Callback):
    def predict_end(self, state, logger):
        self.number = int(state.predict_timestamp.sample)


def predict(batch_size, microbatch_size, num_batches):
    """Predict five samples on two ranks, and return the samples whose outputs came, and how many were counted."""
    dataset, samples = Numbers(5), Samples()
    loader = DataLoader(dataset, batch_size, sampler=dist.get_sampler(dataset))
    with make_trainer(callbacks=samples) as trainer:
        linear = trainer.state.model.module if hasattr(trainer.state.model, "module") else trainer.state.model
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.fill_(0.25 if parameter.ndim == 2 else 0.0)
        outputs = trainer.predict(loader, num_batches, device_predict_microbatch_size=microbatch_size)
    return [int(row[0]) for output in outputs for row in output], samples.number


@pytest.mark.parametrize(
    ("batch_size", "microbatch_size", "num_batches", "expected"),
    [
        pytest.param(3, None, -1, ([0, 2, 4], [1, 3]), id="among others"),
        pytest.param(2, None, -1, ([0, 2, 4], [1, 3]), id="in a batch of its own"),
        pytest.param(3, 2, -1, ([0, 2, 4], [1, 3]), id="in a microbatch of its own"),
        pytest.param(2, None, 1, ([0, 2], [1, 3]), id="not reached"),
    ],
)
def test_predictions_have_no_sample_that_a_sampler_repeats(
    batch_size, microbatch_size, num_batches, expected, tmp_path
):
    """The second rank returned sample 0 as well, which the sampler gives it so that both have three."""
    first, second = run_ranks(predict, batch_size, microbatch_size, num_batches, store=tmp_path / "store")
    assert (first[0], second[0]) == expected
    assert first[1] == second[1] == sum(map(len, expected))
