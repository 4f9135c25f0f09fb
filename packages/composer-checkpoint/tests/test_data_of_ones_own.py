"""Wherever the randomness of data lives, however it is held, a resumed run reads what an uninterrupted one reads."""

import itertools
import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from composer_checkpoint import DataPosition, load_checkpoint, save_checkpoint
from composer_events import State

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 12, 3, 3
BATCHES_PER_EPOCH = NUM_SAMPLES // BATCH_SIZE
STOPS = {"in epoch 0": 3, "in epoch 1": 7, "at the end of epoch 0": 4, "between epochs": None}


class PythonHeld:
    def __init__(self):
        self.rng = random.Random(3)

    def draw(self):
        return self.rng.random()


class NumpyHeld:
    def __init__(self):
        self.tools = {"noise": [np.random.default_rng(3)]}

    def draw(self):
        return self.tools["noise"][0].random()


class LegacyHeld:
    def __init__(self):
        self.rng = np.random.RandomState(3)

    def draw(self):
        return self.rng.rand()


class TorchHeld:
    __slots__ = ("gen",)

    def __init__(self):
        self.gen = torch.Generator().manual_seed(3)

    def draw(self):
        return float(torch.rand((), generator=self.gen))


class ClassHeld:
    """Holds it for all instances, which tests give a class each."""

    def draw(self):
        return self.rng.random()


class ClosureHeld:
    def __init__(self):
        rng = random.Random(3)
        self.draw = lambda: rng.random()


class Process:
    def draw(self):
        return random.random() + np.random.rand() + float(torch.rand(()))


class Counter:
    """Draws nothing; what it gives follows from how often it was asked."""

    def __init__(self):
        self.num_drawn = 0

    def draw(self):
        self.num_drawn += 1
        return random.Random(self.num_drawn).random()


class Hidden:
    """Holds its state where only `state_dict` finds it."""

    def __init__(self):
        self._states = np.zeros(100, dtype=np.int64)

    def draw(self):
        self._states[0] += 1
        return random.Random(int(self._states[0])).random()

    def state_dict(self):
        return {"drawn": int(self._states[0])}

    def load_state_dict(self, state):
        self._states[0] = state["drawn"]


class Lazy:
    """Makes the data when it is first asked."""

    def __init__(self):
        self.is_ready = False

    def draw(self):
        if not self.is_ready:
            self.data, self.is_ready = [random.random() for _ in range(100)], True
        return self.data[7]


class LazyHeld(PythonHeld):
    """Makes the generator when it is first asked."""

    def __init__(self):
        self.rng = None

    def draw(self):
        self.rng = random.Random(3) if self.rng is None else self.rng
        return self.rng.random()


class SetEpoch:
    def __init__(self):
        self.epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def draw(self):
        return random.Random(self.epoch + 100).random()


def class_held():
    return type("ClassHeld", (ClassHeld,), {"rng": random.Random(3)})()


HOLDERS = {
    "random.Random": PythonHeld,
    "numpy generator in a dict": NumpyHeld,
    "numpy RandomState": LegacyHeld,
    "torch generator in a slot": TorchHeld,
    "of the class": class_held,
    "closure": ClosureHeld,
    "process": Process,
    "counter": Counter,
    "state_dict": Hidden,
    "made at first": Lazy,
    "generator made at first": LazyHeld,
    "set_epoch": SetEpoch,
}


class Shuffled:
    """A sampler that sorts by what its holder draws, and counts its epochs behind the last sample."""

    def __init__(self, holder=None):
        self.holder, self.num_epochs = holder, 0

    def __iter__(self):
        keys = [self.holder.draw() if self.holder else 0 for _ in range(NUM_SAMPLES)]
        yield from sorted(range(NUM_SAMPLES), key=lambda index: (keys[index], (index * 5 + self.num_epochs) % 12))
        self.num_epochs += 1

    def __len__(self):
        return NUM_SAMPLES


class Batches(Shuffled):
    """A batch sampler around another sampler."""

    def __init__(self, holder):
        self.sampler = Shuffled(holder)

    def __iter__(self):
        yield from itertools.batched(self.sampler, BATCH_SIZE) if hasattr(itertools, "batched") else self._cut()

    def _cut(self):
        order = iter(self.sampler)
        while batch := list(itertools.islice(order, BATCH_SIZE)):
            yield batch

    def __len__(self):
        return BATCHES_PER_EPOCH


class Numbers(Dataset):
    def __init__(self, holder=None):
        self.holder = holder

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return index + (self.holder.draw() if self.holder else 0)


class Subset(Dataset):
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return self.inner[index]


class Stream(IterableDataset):
    def __init__(self, holder):
        self.holder = holder

    def __iter__(self):
        return (number + self.holder.draw() for number in range(NUM_SAMPLES))


class Collate:
    def __init__(self, holder):
        self.holder = holder

    def __call__(self, samples):
        return torch.tensor([sample + self.holder.draw() for sample in samples])


class Loader:
    """No DataLoader."""

    def __init__(self, holder):
        self.holder = holder

    def __iter__(self):
        return (torch.tensor([number + self.holder.draw()]) for number in range(BATCHES_PER_EPOCH))


PLACES = {
    "sampler": lambda holder, **workers: DataLoader(Numbers(), BATCH_SIZE, sampler=Shuffled(holder), **workers),
    "batch sampler": lambda holder, **workers: DataLoader(Numbers(), batch_sampler=Batches(holder), **workers),
    "dataset": lambda holder, **workers: DataLoader(Subset(Numbers(holder)), BATCH_SIZE, **workers),
    "iterable dataset": lambda holder, **workers: DataLoader(Stream(holder), BATCH_SIZE, **workers),
    "collate_fn": lambda holder, **workers: DataLoader(
        Numbers(), BATCH_SIZE, shuffle=True, collate_fn=Collate(holder), **workers
    ),
    "sampler and dataset": lambda holder, **workers: DataLoader(
        Numbers(holder), BATCH_SIZE, sampler=Shuffled(holder), **workers
    ),
    "loader": lambda holder: Loader(holder),
}
WORKERS = {"": {}, "workers": {"num_workers": 2}, "persistent": {"num_workers": 2, "persistent_workers": True}}

# A warning tells of these, which live in worker processes; a value that changes there for every stop, a generator that
# persists from epoch to epoch for those after epoch 0.
IN_WORKERS = ("dataset", "iterable dataset", "collate_fn", "sampler and dataset")


def make_state(loader):
    state = State(torch.nn.Linear(1, 1), 1, "plum", "cpu", train_dataloader=loader)
    DataPosition.attach(state)
    return state


def read(state, path=None, stops=()):
    """Read to the end of training as a loop with dropout does, and save where it says."""
    seen, position = {}, DataPosition.of(state)
    while state.timestamp.epoch < NUM_EPOCHS:
        batches = position.open(state)
        while state.timestamp.batch_in_epoch < BATCHES_PER_EPOCH:
            batch = next(batches)
            torch.rand(2), random.random(), np.random.rand()  # what the model and listeners draw
            state.timestamp = state.timestamp.to_next_batch(samples=BATCH_SIZE)
            number = int(state.timestamp.batch)
            seen[number] = batch.tolist()
            if number in stops:
                save_checkpoint(state, f"{path}/{number}.pt")
        if not seen or min(seen) > int(state.timestamp.batch):
            position.skip_to_end(state.train_dataloader)
        state.timestamp = state.timestamp.to_next_epoch()
        if None in stops and state.timestamp.epoch == 1:
            save_checkpoint(state, f"{path}/None.pt")
    position.close()
    return seen


def seed():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


KINDS_IN_WORKERS = (
    "random.Random",
    "process",
    "counter",
    "state_dict",
    "made at first",
    "generator made at first",
    "set_epoch",
)
CELLS = [
    pytest.param(place, held, workers, id=" ".join(filter(None, (place, held, workers))))
    for place, held, workers in itertools.product(PLACES, HOLDERS, WORKERS)
    if not workers or (held in KINDS_IN_WORKERS and place != "loader")
    if workers != "persistent" or place in IN_WORKERS
]


@pytest.mark.parametrize(("place", "held", "workers"), CELLS)
def test_a_resumed_run_reads_what_an_uninterrupted_one_reads(tmp_path, place, held, workers):
    """Samples were read twice and others never, and none of the samplers and datasets had the epoch."""

    def loader():
        return PLACES[place](HOLDERS[held](), **WORKERS[workers])

    seed()
    expected = read(make_state(loader()), tmp_path, STOPS.values())
    if held == "set_epoch":
        assert expected[1] != expected[5] != expected[9]
    for name, stop in STOPS.items():
        torch.manual_seed(99)
        state = make_state(loader())
        load_checkpoint(tmp_path / f"{stop}.pt", state, None)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            resumed = read(state)
        if not warned:
            assert resumed == {number: expected[number] for number in range((stop or 4) + 1, 13)}, name
            continue
        assert workers, str(warned[0].message)
        assert place in IN_WORKERS, str(warned[0].message)
        (message,) = [str(warning.message) for warning in warned]
        assert "train_dataloader.dataset, a " in message
        assert "state_dict" in message
