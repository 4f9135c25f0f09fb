"""A resumed run reads what an uninterrupted one reads, wherever the randomness of the data is."""

import itertools
import os
import random
import shutil
import tempfile
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
        self.tools = {"noise": [np.random.default_rng(number) for number in range(80)]}

    def draw(self):
        return self.tools["noise"][79].random()


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
        self.draw = lambda *, other=random.Random(4): rng.random() + other.random()  # noqa: B008


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
    "numpy generators in a dict": NumpyHeld,
    "numpy RandomState": LegacyHeld,
    "torch generator in a slot": TorchHeld,
    "of the class": class_held,
    "closure and default": ClosureHeld,
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
WORKERS = {"": {}, "worker": {"num_workers": 1}, "persistent": {"num_workers": 1, "persistent_workers": True}}


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


CELLS = [
    (place, held, workers)
    for place, held, workers in itertools.product(PLACES, HOLDERS, WORKERS)
    if not workers or (held in ("random.Random", "state_dict", "made at first") and place in ("dataset", "sampler"))
    if held != "counter" or place in ("sampler", "batch sampler")  # others begin to count again
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
        # What persists in a worker from epoch to epoch.
        assert (place, workers) == ("dataset", "persistent"), str(warned[0].message)
        assert name != "in epoch 0"
        (message,) = [str(warning.message) for warning in warned]
        assert "train_dataloader.dataset, a Subset" in message
        assert "state_dict" in message


class Cached(Dataset):
    """Loads from memory once all is there, and keeps files open."""

    def __init__(self):
        self.kept, self.num_kept, self.is_full, self.fd, self.folder = {}, 0, False, None, None

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        if self.fd is None:
            self.folder = tempfile.mkdtemp()
            with open(f"{self.folder}/numbers", "wb") as file:
                file.write(bytes(range(NUM_SAMPLES)))
            self.fd = os.open(f"{self.folder}/numbers", os.O_RDONLY)
        if self.is_full or self.num_kept == NUM_SAMPLES:
            return self.kept[index]
        with open(f"{self.folder}/numbers", "rb") as file:
            assert file.read()[index] == os.pread(self.fd, 1, index)[0]
        if index not in self.kept:
            self.kept[index], self.num_kept = index, self.num_kept + 1
        self.is_full = len(self.kept) == NUM_SAMPLES
        return index

    def end(self):
        """Leave the folder and the number of the file to others, as the end of the process does."""
        shutil.rmtree(self.folder)
        with open(os.devnull) as other:
            os.dup2(other.fileno(), self.fd)


class Sorting:
    """A sampler that keeps an order in its first epoch, which its numbers say that it has."""

    def __init__(self):
        self.order, self.has_order, self.num_epochs = None, False, 0

    def __iter__(self):
        if self.has_order or self.num_epochs:
            return iter(self.order)
        return self.first()

    def first(self):
        order = torch.randperm(NUM_SAMPLES)
        yield from order.tolist()
        self.order, self.has_order, self.num_epochs = order.flip(0).numpy(), True, self.num_epochs + 1

    def __len__(self):
        return NUM_SAMPLES


class Filling(Sorting):
    """One whose order has its place from the beginning."""

    def __init__(self):
        self.order, self.has_order, self.num_epochs = np.zeros(NUM_SAMPLES, dtype=np.int64), False, 0

    def __iter__(self):
        return iter(self.order) if self.num_epochs else self.first()

    def first(self):
        order = torch.randperm(NUM_SAMPLES)
        yield from order.tolist()
        self.order[:], self.num_epochs = order.flip(0).numpy(), self.num_epochs + 1


@pytest.mark.parametrize("sampler", [None, Sorting, Filling])
def test_flags_and_numbers_are_not_restored_without_what_they_stand_for(tmp_path, sampler):
    """A resumed run raised a KeyError, a TypeError, "Bad file descriptor", or read sample 0 for all samples."""

    def loader():
        return DataLoader(Cached(), BATCH_SIZE, sampler=sampler and sampler(), shuffle=sampler is None)

    seed()
    first = loader()
    expected = read(make_state(first), tmp_path, STOPS.values())
    first.dataset.end()
    for stop in STOPS.values():
        state = make_state(loader())
        load_checkpoint(tmp_path / f"{stop}.pt", state, None)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            resumed = read(state)
        state.train_dataloader.dataset.end()
        assert sorted(itertools.chain(*(resumed[number] for number in (9, 10, 11, 12)))) == list(range(NUM_SAMPLES))
        if sampler is None or stop == 3:
            assert not warned
            assert resumed == {number: expected[number] for number in range((stop or 4) + 1, 13)}
        assert all("has chosen other samples" in str(warning.message) for warning in warned)


class TwoArguments(Numbers):
    def set_epoch(self, epoch, seed):
        raise AssertionError


class NoArgument(Numbers):
    def set_epoch(self):
        raise AssertionError


class Refusing(Numbers):
    def set_epoch(self, epoch):
        raise NotImplementedError("use the sampler's")


@pytest.mark.parametrize("kind", [TwoArguments, NoArgument, Refusing])
def test_a_set_epoch_that_cannot_be_called_is_left_out_with_one_warning(kind):
    """Training ended with its error."""
    seed()
    expected = read(make_state(DataLoader(Numbers(), BATCH_SIZE, shuffle=True)))
    seed()
    with pytest.warns(UserWarning, match="set_epoch") as warned:
        assert read(make_state(DataLoader(kind(), BATCH_SIZE, shuffle=True))) == expected
    (message,) = [str(warning.message) for warning in warned]
    assert message.startswith(f"{kind.__name__}.set_epoch(0) raised ")


NOISE = np.random.default_rng(3)


def noisy(value, is_twice=False):
    return value + noise(is_twice)


def noise(is_twice):
    return noisy(0) if is_twice else round(NOISE.random(), 3)  # the two call each other


class ByHelper(Numbers):
    def __getitem__(self, index):
        return torch.tensor(noisy(index))


class ByStaticMethod(Numbers):
    @staticmethod
    def noisy(value):
        return value + round(NOISE.random(), 3)

    def __getitem__(self, index):
        return torch.tensor(self.noisy(index))


class ByProperty(Numbers):
    @property
    def noise(self):
        return round(NOISE.random(), 3)

    def __getitem__(self, index):
        return torch.tensor(index + self.noise)


@pytest.mark.parametrize("kind", [ByHelper, ByStaticMethod, ByProperty])
@pytest.mark.parametrize("stop", [2, 6])
def test_a_generator_of_the_module_is_found_through_what_draws_from_it(tmp_path, kind, stop):
    """Other numbers were drawn after a resumption, and nothing said so."""

    def make():
        NOISE.bit_generator.state = np.random.default_rng(3).bit_generator.state
        return make_state(DataLoader(kind(), BATCH_SIZE))

    expected = read(make(), tmp_path, [stop])
    state = make()
    load_checkpoint(tmp_path / f"{stop}.pt", state, None)
    assert read(state) == {batch: expected[batch] for batch in expected if batch > stop}


class Scaled(Numbers):
    def __init__(self):
        self.scale, self.is_late, self.num_read = 1.0, False, 0

    def __getitem__(self, index):
        self.num_read += 1
        return torch.tensor(index * self.scale + 100 * self.is_late)


@pytest.mark.parametrize("stop", [3, 4, 6, 8, 9, 11])
def test_what_a_listener_sets_on_a_dataset_at_the_start_of_an_epoch_is_there_inside_it(tmp_path, stop):
    """The first samples after a resumption were those of another epoch, since EPOCH_START is not sent inside one."""

    def read_with_listener(state, path=None):
        seen, position = {}, DataPosition.of(state)
        while state.timestamp.epoch < NUM_EPOCHS:
            position.begin(state)
            if state.timestamp.batch_in_epoch == 0:  # as the Trainer sends EPOCH_START
                dataset = state.train_dataloader.dataset
                dataset.is_late = state.timestamp.epoch > 1
                if state.timestamp.epoch == 1:
                    dataset.scale = 2.0
            batches = position.open(state)
            while state.timestamp.batch_in_epoch < BATCHES_PER_EPOCH:
                batch = next(batches)
                state.timestamp = state.timestamp.to_next_batch(samples=BATCH_SIZE)
                number = int(state.timestamp.batch)
                seen[number] = batch.tolist()
                if number == stop and path is not None:
                    save_checkpoint(state, f"{path}/saved.pt")
            if not seen or min(seen) > int(state.timestamp.batch):
                position.skip_to_end(state.train_dataloader)
            state.timestamp = state.timestamp.to_next_epoch()
        position.close()
        return seen

    seed()
    expected = read_with_listener(make_state(DataLoader(Scaled(), BATCH_SIZE, shuffle=True)), tmp_path)
    state = make_state(DataLoader(Scaled(), BATCH_SIZE, shuffle=True))
    load_checkpoint(tmp_path / "saved.pt", state, None)
    assert read_with_listener(state) == {batch: expected[batch] for batch in expected if batch > stop}


class InPlace(Shuffled):
    def __init__(self):
        self.order = list(range(NUM_SAMPLES))

    def __iter__(self):
        random.shuffle(self.order)
        return iter(list(self.order))


class ArrayInPlace(Shuffled):
    def __init__(self):
        self.order = np.arange(NUM_SAMPLES)

    def __iter__(self):
        np.random.shuffle(self.order)
        return iter(self.order.tolist())


class Permuted(Shuffled):
    def __init__(self):
        self.order = torch.arange(NUM_SAMPLES)

    def __iter__(self):
        self.order = self.order[torch.randperm(NUM_SAMPLES)]
        return iter(self.order.tolist())


class InPlaceByText(Shuffled):
    def __init__(self):
        self.order = [str(index) for index in range(NUM_SAMPLES)]

    def __iter__(self):
        random.shuffle(self.order)
        return map(int, list(self.order))


@pytest.mark.parametrize("kind", [InPlace, ArrayInPlace, Permuted])
@pytest.mark.parametrize("stop", [3, 4, None, 6, 8, 11])
def test_an_order_that_changes_from_epoch_to_epoch_goes_on(tmp_path, kind, stop):
    """Another order came, in silence where the checkpoint was from between two epochs."""
    seed()
    expected = read(make_state(DataLoader(Numbers(), BATCH_SIZE, sampler=kind())), tmp_path, [stop])
    state = make_state(DataLoader(Numbers(), BATCH_SIZE, sampler=kind()))
    load_checkpoint(tmp_path / f"{stop}.pt", state, None)
    first = (stop or BATCHES_PER_EPOCH) + 1
    assert read(state) == {batch: expected[batch] for batch in expected if batch >= first}


def test_a_sampler_whose_order_cannot_be_brought_back_is_named_inside_an_epoch(tmp_path):
    """Some samples were read twice and others never."""
    seed()
    read(make_state(DataLoader(Numbers(), BATCH_SIZE, sampler=InPlaceByText())), tmp_path, [11])
    state = make_state(DataLoader(Numbers(), BATCH_SIZE, sampler=InPlaceByText()))
    load_checkpoint(tmp_path / "11.pt", state, None)
    with pytest.warns(UserWarning, match="The sampler of train_dataloader, a BatchSampler, has chosen other samples"):
        read(state)
