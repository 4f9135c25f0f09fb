"""Samplers and datasets of one's own shuffle anew in each epoch, and a run that is stopped reads every sample once."""

import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from composer import Callback, Trainer
from composer.models import ComposerModel
from composer.utils import dist
from composer_dist import LengthCurriculumSampler, RepeatedAugmentationSampler
from composer_dist.testing import run_ranks

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 12, 4, 3


class Mean(ComposerModel):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        return self.scale * batch.float().mean()

    def loss(self, outputs, batch):
        return outputs


class Bucketing:
    """Shuffles batches of neighbors, by a generator of its own and by the number of an epoch that it has been given."""

    def __init__(self, sampler, name="epoch"):
        self.sampler, self.rng, self.name = sampler, random.Random(7), name

    def __len__(self):
        return len(self.sampler) // BATCH_SIZE

    def __iter__(self):
        order = list(self.sampler)
        batches = [order[first : first + BATCH_SIZE] for first in range(0, len(order), BATCH_SIZE)]
        self.rng.shuffle(batches)
        shift = vars(self).get(self.name, 0)
        return ([(index + 5 * shift) % NUM_SAMPLES for index in batch] for batch in batches)


class TakesEpoch(Bucketing):
    def set_epoch(self, epoch):
        self.epoch = epoch


class Stream(IterableDataset):
    """Numbers in an order that follows from the epoch."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        own = range(dist.get_global_rank(), NUM_SAMPLES * dist.get_world_size(), dist.get_world_size())
        return iter(random.Random(self.epoch).sample(own, NUM_SAMPLES))


class NoDataLoader:
    def __init__(self):
        self.inner = Stream()

    def __iter__(self):
        return iter(torch.tensor(list(self.inner)).split(BATCH_SIZE))


def bucketed(kind, name="epoch", **workers):
    numbers = range(NUM_SAMPLES * dist.get_world_size())
    sampler = dist.get_sampler(numbers, shuffle=True, seed=3)
    return DataLoader(numbers, batch_sampler=kind(sampler, name), **workers)


class Augmented(Dataset):
    def __len__(self):
        return NUM_SAMPLES * dist.get_world_size()

    def __getitem__(self, index):
        return index + torch.rand(()).item()


def sampled(make):
    data = Augmented()
    return DataLoader(data, BATCH_SIZE, sampler=make(data))


class SetsEpoch(Callback):
    """What scripts did where the Trainer did not: in the way `how`."""

    def __init__(self, how):
        self.how = how

    def epoch_start(self, state, logger):
        self.how(state.train_dataloader.batch_sampler, int(state.timestamp.epoch))


def persistent(data):
    return DataLoader(data, BATCH_SIZE, num_workers=1, persistent_workers=True)


# By how the epoch comes to the data: what makes the dataloader, and the callback that a script has for that.
WAYS = {
    "batch sampler": (lambda: bucketed(TakesEpoch), None),
    "iterable dataset": (lambda: DataLoader(Stream(), BATCH_SIZE), None),
    "workers": (lambda: DataLoader(Stream(), BATCH_SIZE, num_workers=1), None),
    "persistent workers": (lambda: persistent(Stream()), None),
    "no DataLoader": (NoDataLoader, None),
    "repeated augmentation": (lambda: sampled(lambda data: RepeatedAugmentationSampler(data, 2)), None),
    "length curriculum": (lambda: sampled(lambda data: LengthCurriculumSampler(data, range(len(data)), 2.5)), None),
    "callback": (lambda: bucketed(TakesEpoch), lambda sampler, epoch: sampler.set_epoch(epoch)),
    "callback with a number of its own": (
        lambda: bucketed(TakesEpoch),
        lambda sampler, epoch: sampler.set_epoch(10 + 3 * epoch),
    ),
    "callback that sets an attribute": (
        lambda: bucketed(Bucketing, "my_epoch"),
        lambda sampler, epoch: setattr(sampler, "my_epoch", epoch),
    ),
}


class Seen(Callback):
    def __init__(self):
        self.batches = {}

    def batch_start(self, state, logger):
        self.batches[int(state.timestamp.batch)] = state.batch.tolist()


def train(way, **settings):
    make_loader, how = WAYS[way]
    model, seen = Mean(), Seen()
    with Trainer(
        model=model,
        train_dataloader=make_loader(),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[seen, *([SetsEpoch(how)] if how else [])],
        device="cpu",
        progress_bar=False,
        max_duration=f"{NUM_EPOCHS}ep",
        train_subset_num_batches=NUM_SAMPLES // BATCH_SIZE,  # which no iterable dataset says
        device_train_microbatch_size=BATCH_SIZE,
        seed=5,
        run_name="plum",
        **settings,
    ) as trainer:
        trainer.fit()
    return seen.batches


def read_and_resume(ways, folder):
    """Return this rank's batches of an uninterrupted run for each way, and those of runs resumed after 2, 3 and 4."""
    found = {}
    for way in ways:
        saved = f"{folder}/{way}"
        whole = train(way, save_folder=saved, save_interval="1ba")
        dist.barrier()
        stops = {stop: train(way, load_path=f"{saved}/ep{(stop - 1) // 3}-ba{stop}-rank0.pt") for stop in (2, 3, 4)}
        found[way] = whole, stops
    return found


def check(found):
    for way, (whole, stops) in found.items():
        epochs = [[whole[number] for number in range(first, first + 3)] for first in (0, 3, 6)]
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0], way
        for stop, resumed in stops.items():
            assert resumed == {number: whole[number] for number in range(stop, 9)}, (way, stop)


@pytest.mark.parametrize("way", WAYS)
def test_each_epoch_has_an_order_of_its_own_and_a_stopped_run_reads_each_sample_once(tmp_path, way):
    """Every epoch had the same order, and of a run stopped after 4 batches of 4 some samples came twice, some never."""
    check(read_and_resume([way], tmp_path))


def test_each_of_two_ranks_reads_each_of_its_samples_once(tmp_path):
    """The same on every rank, whose samplers hold generators in states of their own."""
    ways = (
        "batch sampler",
        "iterable dataset",
        "no DataLoader",
        "callback that sets an attribute",
        "repeated augmentation",
        "length curriculum",
    )
    for found in run_ranks(read_and_resume, ways, str(tmp_path), store=tmp_path / "store", timeout_s=300):
        check(found)
