"""However a map-style dataset is read, a run that is stopped anywhere goes on to the last bit."""

import itertools
import multiprocessing
import os
import random
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from composer import Callback, Trainer
from composer.models import ComposerClassifier
from composer.utils import dist
from composer_dist.testing import run_ranks

BATCHES_PER_EPOCH, BATCH_SIZE, NUM_EPOCHS = 4, 3, 3

KINDS = [
    pytest.param(num_workers, is_persistent, is_augmented, has_sampler, id="-".join(filter(None, names)))
    for num_workers, is_persistent, is_augmented, has_sampler in itertools.product(
        (0, 1, 2), (False, True), (False, True), (False, True)
    )
    if num_workers or not is_persistent
    for names in [
        (
            f"{num_workers} workers",
            "persistent" if is_persistent else "",
            "augmented" if is_augmented else "",
            "sampler" if has_sampler else "",
        )
    ]
]


class Points(Dataset):
    """Points in two classes, moved by the noise of all three generators if they are augmented."""

    def __init__(self, size, is_augmented):
        self.points = torch.randn(size, 2, generator=torch.Generator().manual_seed(0))
        self.is_augmented = is_augmented

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        point, label = self.points[index], (self.points[index].sum() > 0).long()
        if self.is_augmented:
            noise = torch.tensor([random.random(), np.random.rand()], dtype=torch.float32) + torch.randn(2)
            point = point + 0.1 * noise
        return point, label


class Losses(Callback):
    """Keeps the loss of each batch, to the last bit, and draws on its own as any listener may."""

    def __init__(self):
        self.seen = {}

    def batch_end(self, state, logger):
        self.seen[int(state.timestamp.batch)] = float(state.loss.detach()).hex()


def make_loader(dataset, has_sampler, **settings):
    sampler = dist.get_sampler(dataset, shuffle=True) if has_sampler else None
    return DataLoader(dataset, BATCH_SIZE, shuffle=sampler is None, sampler=sampler, **settings)


def train(
    num_workers=0,
    is_persistent=False,
    is_augmented=True,
    has_sampler=False,
    callbacks=(),
    make_loader=make_loader,
    **settings,
):
    torch.set_num_threads(1)  # to the last bit, a sum depends on how many threads share it
    torch.manual_seed(0)
    model = ComposerClassifier(
        nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2)), num_classes=2
    )
    losses = Losses()
    dataset = Points(BATCHES_PER_EPOCH * BATCH_SIZE * dist.get_world_size(), is_augmented)
    loader = make_loader(dataset, has_sampler, num_workers=num_workers, persistent_workers=is_persistent)
    with Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.05),
        callbacks=[losses, *callbacks],
        device="cpu",
        progress_bar=False,
        seed=5,
        run_name="plum",
        **{"max_duration": f"{NUM_EPOCHS}ep", **settings},
    ) as trainer:
        trainer.fit()
    return losses.seen


def checkpoint(folder, batch):
    return os.path.join(folder, f"ep{(batch - 1) // BATCHES_PER_EPOCH}-ba{batch}-rank0.pt")


def assert_resumed(expected, folder, stops, *kind):
    for batch in stops:
        resumed = train(*kind, load_path=checkpoint(folder, batch))
        assert resumed == {number: expected[number] for number in range(batch + 1, 13)}, (batch, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "is_persistent", "is_augmented", "has_sampler"), KINDS)
def test_a_run_goes_on_to_the_last_bit(tmp_path, num_workers, is_persistent, is_augmented, has_sampler):
    kind = (num_workers, is_persistent, is_augmented, has_sampler)
    expected = train(*kind, save_folder=str(tmp_path), save_interval="1ba")
    # In the middle of the first epoch, at its end, after the first batch of the next one, in the middle of the last;
    # processes take their time to start.
    assert_resumed(expected, str(tmp_path), (4, 10) if num_workers else (2, 4, 5, 10), *kind)


@pytest.mark.parametrize("is_persistent", [False, True])
def test_no_worker_outlives_a_trainer_that_is_closed(is_persistent):
    before = set(multiprocessing.active_children())
    workers = []

    class Watching(Callback):
        def batch_end(self, state, logger):
            workers.append(set(multiprocessing.active_children()) - before)

    train(2, is_persistent, callbacks=[Watching()], max_duration="6ba")  # in the middle of an epoch
    assert all(len(at_once) == 2 for at_once in workers)
    assert not set(multiprocessing.active_children()) - before


def with_generator_of_its_own(dataset, has_sampler, **settings):
    """Shuffle by a generator of the dataloader's, which workers may bring forward before their batches are wanted."""
    return DataLoader(dataset, BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(5), **settings)


def with_sampler_of_its_own(dataset, has_sampler, **settings):
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(5))
    return DataLoader(dataset, BATCH_SIZE, sampler=sampler, **settings)


def with_replacement(dataset, has_sampler, **settings):
    """Draw again and again while the epoch is read."""
    sampler = RandomSampler(dataset, replacement=True, num_samples=100, generator=torch.Generator().manual_seed(5))
    return DataLoader(dataset, BATCH_SIZE, sampler=sampler, **settings)


@pytest.mark.parametrize("make_loader", [with_generator_of_its_own, with_sampler_of_its_own, with_replacement])
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_generator_of_ones_own_goes_on_where_it_was(tmp_path, make_loader, num_workers):
    settings = {"num_workers": num_workers, "make_loader": make_loader, "train_subset_num_batches": BATCHES_PER_EPOCH}
    expected = train(save_folder=str(tmp_path), save_interval="1ba", **settings)
    for batch in (2, 4, 8):  # the end of an epoch twice
        resumed = train(load_path=checkpoint(str(tmp_path), batch), **settings)
        assert resumed == {number: expected[number] for number in range(batch + 1, 13)}, batch


@pytest.mark.parametrize("has_sampler", [False, True])
def test_the_number_of_workers_changes_no_loss(has_sampler):
    alone = train(0, False, True, has_sampler)
    assert train(1, False, True, has_sampler) == alone
    assert train(2, True, True, has_sampler) == alone


def test_what_a_listener_draws_changes_no_batch():
    class Points(Callback):
        def __init__(self, draws):
            self.draws, self.seen = draws, []

        def batch_start(self, state, logger):
            self.seen.append(state.batch[0].tolist())
            if self.draws:
                torch.rand(7), random.random(), np.random.rand()

    plain, drawing = Points(draws=False), Points(draws=True)
    train(callbacks=[plain])
    train(callbacks=[drawing])
    assert plain.seen == drawing.seen


def resume_on_two_ranks(folder):
    """Return this rank's losses with each kind of workers."""
    found = []
    for num_workers, is_persistent in ((0, False), (1, False), (2, False), (2, True)):
        kind, saved = (num_workers, is_persistent, True, True), os.path.join(folder, str(len(found)))
        expected = train(*kind, save_folder=saved, save_interval="1ba")
        dist.barrier()
        assert_resumed(expected, saved, (2, 4, 9), *kind)
        found.append(expected)
    return found


@pytest.mark.slow
def test_two_ranks_go_on_to_the_last_bit(tmp_path):
    folder = str(tmp_path / "saved")
    first, second = run_ranks(resume_on_two_ranks, folder, store=tmp_path / "store", timeout_s=400)
    assert len(first) == len(second) == 4
    assert all(losses != others for losses, others in zip(first, second, strict=True))  # each rank has its own


class Killed(Callback):
    def __init__(self, batch):
        self.batch = batch

    def batch_checkpoint(self, state, logger):
        if state.timestamp.batch == self.batch:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(folder, num_workers, batch):
    train(num_workers, callbacks=[Killed(batch)], save_folder=folder, save_interval="1ba", autoresume=True)


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "batch"), [(0, 3), (1, 8), (2, 6)])
def test_a_killed_process_is_gone_on_from(tmp_path, num_workers, batch):
    saved = str(tmp_path / "saved")
    with pytest.raises(AssertionError, match=f"died with exit code -{signal.SIGKILL:d}$"):
        run_ranks(train_until_killed, saved, num_workers, batch, store=tmp_path / "store", world_size=1)
    resumed = train(num_workers, save_folder=saved, save_interval="1ba", autoresume=True)
    # Whether the listener is told before or after the saver, at most the batch at hand is trained on again.
    assert min(resumed) in (batch, batch + 1)
    expected = train(num_workers)
    assert resumed == {number: expected[number] for number in range(min(resumed), 13)}


class Draws(Callback):
    """Keeps what training draws after each batch, and what is evaluated on."""

    def __init__(self):
        self.drawn, self.evaluated = {}, {}

    def batch_end(self, state, logger):
        self.drawn[int(state.timestamp.batch)] = torch.rand(2).tolist()

    def eval_batch_end(self, state, logger):
        self.evaluated.setdefault(int(state.timestamp.batch), []).append(state.batch[0].tolist())


@pytest.mark.parametrize(("num_workers", "is_persistent"), [(0, False), (1, True)])
def test_evaluations_come_again_and_leave_training_as_it_is(tmp_path, num_workers, is_persistent):
    def run(**settings):
        loader = DataLoader(Points(6, True), 3, shuffle=True, num_workers=num_workers, persistent_workers=is_persistent)
        draws = Draws()
        losses = train(callbacks=[draws], **{"eval_dataloader": loader, "eval_interval": "2ba", **settings})
        return losses, draws

    expected, draws = run(save_folder=str(tmp_path), save_interval="1ba", max_duration="8ba")
    resumed, again = run(load_path=checkpoint(str(tmp_path), 3), max_duration="8ba")
    assert resumed == {number: expected[number] for number in range(4, 9)}
    assert again.evaluated == {number: draws.evaluated[number] for number in (4, 6, 8)}
    assert draws.evaluated[4] != draws.evaluated[6]  # each is augmented anew
    alone, undisturbed = run(eval_dataloader=None, eval_interval=1, max_duration="8ba")
    assert (alone, undisturbed.drawn) == (expected, draws.drawn)
