"""After a resumption the very same batches come again."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from composer_checkpoint import DataPosition, load_checkpoint, save_checkpoint
from composer_dist import get_sampler
from composer_dist.testing import run_ranks
from composer_events import State

NUM_EPOCHS, NUM_SAMPLES, BATCH_SIZE = 3, 10, 2


class Augmented(Dataset):
    """Numbers with noise from all three generators."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return index + torch.rand(()) + random.random() + np.random.rand()


def shuffled(num_workers=0):
    return DataLoader(Augmented(), BATCH_SIZE, shuffle=True, num_workers=num_workers)


class Unsteady:
    """A sampler that draws again and again from the generator of the process."""

    def __iter__(self):
        return (random.randrange(NUM_SAMPLES) for _ in range(NUM_SAMPLES))

    def __len__(self):
        return NUM_SAMPLES


def held(noise):
    """Return a dataset of what is in memory, that draws only if its samples are given noise."""
    numbers = TensorDataset(torch.arange(4.0)), TensorDataset(torch.arange(10.0))
    together = StackDataset(Subset(ConcatDataset(numbers), range(NUM_SAMPLES)), torch.arange(NUM_SAMPLES))
    collate_fn = (lambda samples: [sample + torch.rand(()) for _, sample in samples]) if noise else None
    return DataLoader(together, BATCH_SIZE, shuffle=True, collate_fn=collate_fn)


LOADERS = {
    "shuffled": shuffled,
    "in memory": lambda: held(noise=False),
    "in memory, with noise": lambda: held(noise=True),
    "one worker": lambda: shuffled(1),
    "two workers": lambda: shuffled(2),
    "persistent workers": lambda: DataLoader(
        Augmented(), BATCH_SIZE, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "a worker without batches": lambda: DataLoader(Augmented(), None, sampler=range(5), num_workers=1),
    "own order": lambda: DataLoader(Augmented(), BATCH_SIZE, sampler=Unsteady()),
    "distributed sampler": lambda: DataLoader(
        Augmented(), BATCH_SIZE, sampler=DistributedSampler(Augmented(), 1, 0, seed=3)
    ),
    "own generator": lambda: DataLoader(
        Augmented(), BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "generator of the sampler": lambda: DataLoader(
        Augmented(), BATCH_SIZE, sampler=RandomSampler(Augmented(), generator=torch.Generator().manual_seed(6))
    ),
    "weighted": lambda: DataLoader(Augmented(), BATCH_SIZE, sampler=WeightedRandomSampler([1.0] * 10, 10)),
    "list": lambda: [torch.tensor([float(index)]) for index in range(5)],
}


def make_state(loader, **settings):
    state = State(torch.nn.Linear(1, 1), 1, "plum", "cpu", train_dataloader=loader, **settings)
    DataPosition.attach(state)
    return state


def run_epochs(state, path=None):
    """Read to the end of training as a loop with dropout does, and save after each batch."""
    seen = {}
    while state.timestamp.epoch < NUM_EPOCHS:
        for batch in DataPosition.of(state).open(state):
            noise = torch.rand(2)  # what dropout draws
            state.timestamp = state.timestamp.to_next_batch(samples=BATCH_SIZE)
            seen[int(state.timestamp.batch)] = (batch, noise)
            if path is not None:
                save_checkpoint(state, f"{path}/ba{{batch}}.pt")
        state.timestamp = state.timestamp.to_next_epoch()
        if path is not None:
            save_checkpoint(state, f"{path}/ep{{epoch}}.pt")
    return seen


def seed():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


@pytest.mark.parametrize("kind", LOADERS)
def test_the_same_batches_come_again_wherever_a_run_was_left(kind, tmp_path):
    seed()
    expected = run_epochs(make_state(LOADERS[kind]()), tmp_path)
    assert len(expected) == 15
    stops = ["ba2", "ba8", "ba13", "ep1", "ep2"] if "worker" in kind else [f"ba{n}" for n in range(1, 16)] + ["ep1"]
    for stop in stops:
        torch.manual_seed(99)  # whatever was drawn before does not matter
        state = make_state(LOADERS[kind]())
        rng = load_checkpoint(tmp_path / f"{stop}.pt", state, None)
        assert rng is not None
        for batch, seen in run_epochs(state).items():
            torch.testing.assert_close(seen, expected[batch], rtol=0, atol=0, msg=f"{stop}, batch {batch}")


def test_a_run_that_was_resumed_can_be_resumed(tmp_path):
    seed()
    expected = run_epochs(make_state(shuffled()), tmp_path)
    state = make_state(shuffled())
    load_checkpoint(tmp_path / "ba7.pt", state, None)
    (tmp_path / "second").mkdir()
    run_epochs(state, tmp_path / "second")
    again = make_state(shuffled())
    load_checkpoint(tmp_path / "second" / "ba9.pt", again, None)
    for batch, seen in run_epochs(again).items():
        torch.testing.assert_close(seen, expected[batch], rtol=0, atol=0)


@pytest.mark.parametrize("noise", [False, True])
def test_what_loading_draws_is_not_missing_elsewhere(noise):
    state = make_state(held(noise))
    seed()
    expected = torch.rand(3), random.random(), np.random.rand()
    seed()
    assert len(list(DataPosition.of(state).open(state))) == 5
    torch.testing.assert_close((torch.rand(3), random.random(), np.random.rand()), expected, rtol=0, atol=0)


class Stateful:
    """A dataloader that knows its place, as torchdata's does."""

    def __init__(self):
        self.next, self.num_read = 0, 0

    def __iter__(self):
        while self.next < 5:
            self.next += 1
            self.num_read += 1
            yield torch.tensor([float(self.next - 1)])
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def test_a_dataloader_that_knows_its_place_is_not_read_from_the_start(tmp_path):
    expected = run_epochs(make_state(Stateful()), tmp_path)
    state = make_state(Stateful())
    load_checkpoint(tmp_path / "ba8.pt", state, None)
    seen = run_epochs(state)
    assert [float(batch) for batch, _ in seen.values()] == [3, 4, 0, 1, 2, 3, 4]
    assert state.train_dataloader.num_read == 7
    for batch, values in seen.items():
        torch.testing.assert_close(values, expected[batch], rtol=0, atol=0)


class Resumable(Augmented):
    """A dataset that goes to its place by itself."""

    def __init__(self):
        self.skipped = 0

    def __getitem__(self, index):
        return float(index + self.skipped)

    def __len__(self):
        return NUM_SAMPLES - self.skipped

    def state_dict(self, num_samples, from_beginning):
        return {"num_samples": num_samples}

    def load_state_dict(self, state):
        self.skipped = state["num_samples"]


def test_a_dataset_that_knows_its_place_is_not_read_from_the_start(tmp_path):
    state = make_state(DataLoader(Resumable(), BATCH_SIZE))
    state.timestamp = state.timestamp.to_next_batch(samples=2).to_next_batch(samples=2)
    path = save_checkpoint(state, str(tmp_path / "ba2.pt"))
    again = make_state(DataLoader(Resumable(), BATCH_SIZE))
    load_checkpoint(path, again, None)
    assert next(DataPosition.of(again).open(again)).tolist() == [4.0, 5.0]


def test_without_spinning_nothing_is_read_twice(tmp_path):
    seed()
    run_epochs(make_state(shuffled()), tmp_path)
    state = make_state([1, 2, 3])
    DataPosition.attach(state, spin=False)
    load_checkpoint(tmp_path / "ba2.pt", state, None)
    assert list(DataPosition.of(state).open(state)) == [1, 2, 3]


def test_the_open_epoch_of_a_checkpoint_that_does_not_say_how_it_began_is_replayed_from_the_seed(tmp_path):
    # As Composer writes them. Without dropout, an epoch draws what it draws before its first batch.
    def loader():
        return DataLoader(torch.arange(NUM_SAMPLES), BATCH_SIZE, shuffle=True)

    seed()
    plain = loader()
    expected = [batch.tolist() for _ in range(2) for batch in plain]
    state = State(torch.nn.Linear(1, 1), 1, "plum", "cpu", train_dataloader=plain)
    state.timestamp = state.timestamp.copy(epoch=1, batch=8, batch_in_epoch=3)
    save_checkpoint(state, str(tmp_path / "ba8.pt"))
    state = make_state(loader())
    load_checkpoint(tmp_path / "ba8.pt", state, None)
    seed()
    assert [batch.tolist() for batch in DataPosition.of(state).open(state)] == expected[8:]


class Counted(Augmented):
    """Remembers what it was asked for."""

    def __init__(self):
        self.asked = []

    def __getitem__(self, index):
        self.asked.append(index)
        return super().__getitem__(index)


def test_what_was_trained_on_is_not_loaded_again(tmp_path):
    seed()
    expected = run_epochs(make_state(DataLoader(Counted(), BATCH_SIZE, shuffle=True)), tmp_path)
    dataset = Counted()
    state = make_state(DataLoader(dataset, BATCH_SIZE, shuffle=True))
    load_checkpoint(tmp_path / "ba8.pt", state, None)
    for batch, seen in run_epochs(state).items():
        torch.testing.assert_close(seen, expected[batch], rtol=0, atol=0)
    # But the first batch of all, which may make what the dataset holds from then on.
    assert len(dataset.asked) == NUM_SAMPLES * NUM_EPOCHS - 8 * BATCH_SIZE + BATCH_SIZE


class OwnGenerator(Counted):
    """Draws from a generator of its own, as some libraries' transforms do, and not from the process's."""

    def __init__(self):
        super().__init__()
        self.transforms = [np.random.default_rng(4)]

    def __getitem__(self, index):
        self.asked.append(index)
        return index + self.transforms[0].random()


@pytest.mark.parametrize(("num_workers", "stop"), [(0, "ba3"), (2, "ba8")])
def test_a_dataset_with_a_generator_of_its_own_is_read_from_the_start_of_the_epoch(num_workers, stop, tmp_path):
    seed()
    expected = run_epochs(make_state(DataLoader(OwnGenerator(), BATCH_SIZE, num_workers=num_workers)), tmp_path)
    state = make_state(DataLoader(OwnGenerator(), BATCH_SIZE, num_workers=num_workers))
    load_checkpoint(tmp_path / f"{stop}.pt", state, None)
    resumed = run_epochs(state)
    assert resumed
    for batch, seen in resumed.items():
        torch.testing.assert_close(seen, expected[batch], rtol=0, atol=0)


def share(dataset, batch_size, layout="full"):
    """Return the state of a rank that reads its share of the samples."""
    loader = DataLoader(dataset, batch_size, sampler=get_sampler(dataset, shuffle=True, seed=3))
    parallelism = SimpleNamespace(fsdp=SimpleNamespace(state_dict_type=layout), fsdp2=None, tp=None)
    return make_state(loader, parallelism_config=parallelism)


def resume_from_per_rank_files(folder):
    seed()
    state, seen = share(Augmented(), 2, "local"), []
    for batch in DataPosition.of(state).open(state):
        seen.append((batch, torch.rand(2)))
        state.timestamp = state.timestamp.to_next_batch(samples=4)
        if len(seen) == 1:
            save_checkpoint(state, f"{folder}/rank{{rank}}.pt")
    torch.manual_seed(99)
    again = share(Augmented(), 2, "local")
    load_checkpoint(f"{folder}/rank{{rank}}.pt", again, None)
    resumed = [(batch, torch.rand(2)) for batch in DataPosition.of(again).open(again)]
    torch.testing.assert_close(resumed, seen[1:], rtol=0, atol=0)
    return seen


def test_each_rank_goes_on_from_its_own_file(tmp_path):
    first, second = run_ranks(resume_from_per_rank_files, str(tmp_path), store=tmp_path / "store")
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["rank0.pt", "rank1.pt"]
    assert len(first) == len(second) == 3
    assert first[0][0].tolist() != second[0][0].tolist()


def rest_of_the_epoch(path, batch_size):
    state = share(range(NUM_SAMPLES), batch_size)
    load_checkpoint(path, state, None)
    return [batch.tolist() for batch in DataPosition.of(state).open(state)]


@pytest.mark.filterwarnings("ignore:the random state of 1 ranks:UserWarning")
def test_more_ranks_finish_an_epoch_with_as_many_samples_a_batch(tmp_path):
    state = share(range(NUM_SAMPLES), 4)
    whole = [sorted(batch.tolist()) for batch in DataPosition.of(state).open(state)]
    state.timestamp = state.timestamp.to_next_batch(samples=4)
    path = save_checkpoint(state, str(tmp_path / "ba1.pt"))
    first, second = run_ranks(rest_of_the_epoch, path, 2, store=tmp_path / "store")
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == whole[1:]


@pytest.mark.slow
def test_workers_that_are_not_forked_are_resumed_as_well(tmp_path):
    def loader():
        return DataLoader(Augmented(), BATCH_SIZE, shuffle=True, num_workers=1, multiprocessing_context="spawn")

    seed()
    expected = run_epochs(make_state(loader()), tmp_path)
    state = make_state(loader())
    load_checkpoint(tmp_path / "ba13.pt", state, None)
    for batch, seen in run_epochs(state).items():
        torch.testing.assert_close(seen, expected[batch], rtol=0, atol=0)
