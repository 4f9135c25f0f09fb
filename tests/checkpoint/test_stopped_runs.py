"""A run that was stopped stays so when it is started again, whenever it was stopped and whatever saves it."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, Event, Trainer
from composer.algorithms import EMA
from composer.callbacks import CheckpointSaver, EarlyStopper
from composer.models import ComposerClassifier
from composer_checkpoint import load_file
from composer_dist import dist
from composer_dist.testing import run_ranks

BATCHES_PER_EPOCH = 2
STOP_AT = 4  # batches

# What counts in the middle of a batch does so before it is over.
STOPS = {
    Event.BATCH_START: STOP_AT - 1,
    Event.AFTER_LOSS: STOP_AT - 1,
    Event.BATCH_END: STOP_AT,
    Event.EVAL_END: STOP_AT,
    Event.BATCH_CHECKPOINT: STOP_AT,
    Event.EPOCH_END: STOP_AT,
    Event.EPOCH_CHECKPOINT: STOP_AT,
    Event.ITERATION_END: STOP_AT,
    Event.ITERATION_CHECKPOINT: STOP_AT,
}
INTERVALS = ["1ba", "3ba", "1ep", lambda state, event: True]


class StopAt(Callback):
    """Stops training on an event."""

    def __init__(self, event, batch, rank=None, **settings):
        self.event, self.batch, self.rank, self.settings = event, batch, rank, settings

    def run_event(self, event, state, logger):
        is_here = self.rank in (None, dist.get_global_rank())
        if event == self.event and int(state.timestamp.batch) == self.batch and is_here:
            state.stop_training(**self.settings)


class Trained(Callback):
    """Counts batches."""

    def __init__(self):
        self.batches = 0

    def batch_end(self, state, logger):
        self.batches += 1


def start(folder, callbacks=(), duration=None, algorithms=None, **settings):
    """Start a run, or start it again, and return how many batches it trains and where it is then."""
    torch.manual_seed(0)
    model = ComposerClassifier(nn.Linear(3, 2), num_classes=2)
    samples = 2 * BATCHES_PER_EPOCH * dist.get_world_size()
    dataset = TensorDataset(torch.randn(samples, 3), torch.randint(2, (samples,)))
    loader = DataLoader(dataset, 2, sampler=dist.get_sampler(dataset))
    trained = Trained()
    if not any(isinstance(callback, CheckpointSaver) for callback in callbacks):
        settings = {"save_folder": folder, **settings}
    settings = {"autoresume": True, "max_duration": "10ep", "eval_dataloader": loader, **settings}
    with Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=algorithms,
        callbacks=[*callbacks, trained],
        run_name="plum",
        device="cpu",
        progress_bar=False,
        **settings,
    ) as trainer:
        trainer.state.iteration_length = "1ep"
        trainer.fit(duration=duration)
        return trained.batches, int(trainer.state.timestamp.batch)


CELLS = [
    (event, interval, is_first)
    for event, interval, is_first in itertools.product(STOPS, INTERVALS, [True, False])
    if is_first or event.value.endswith("checkpoint")  # the order of callbacks matters where both act
]


@pytest.mark.slow
@pytest.mark.parametrize("event", STOPS)
def test_a_run_that_was_stopped_on_any_event_trains_no_further_when_it_is_started_again(tmp_path, event):
    """Each start went on to 10 epochs, where the checkpoint did not know of the stop."""
    wrong = {}
    for number, (event, interval, is_first) in enumerate(cell for cell in CELLS if cell[0] == event):
        folder = str(tmp_path / str(number))
        saver = lambda: CheckpointSaver(folder, "ba{batch}.pt", save_interval=interval)  # noqa: B023
        stopper = StopAt(event, STOPS[event])
        found = [start(folder, [saver(), stopper] if is_first else [stopper, saver()]), start(folder, [saver()])]
        if found != [(STOP_AT, STOP_AT), (0, STOP_AT)]:
            wrong[str(interval), is_first] = found
    assert wrong == {}


def test_an_early_stopper_has_the_last_word_however_often_the_run_is_started(tmp_path):
    """The epochs of each start were 4, 5, 6, ..., since the stopper of each gave training another one."""
    callbacks = lambda: [EarlyStopper("MulticlassAccuracy", "eval", min_delta=10.0)]
    found = [start(str(tmp_path), callbacks(), save_interval="1ep") for _ in range(4)]
    # Nothing gets better than the first evaluation, and one epoch is given for it.
    assert found == [(3 * BATCHES_PER_EPOCH, 3 * BATCHES_PER_EPOCH)] + [(0, 3 * BATCHES_PER_EPOCH)] * 3


@pytest.mark.parametrize("saved", [True, False], ids=["load_path", "autoresume"])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param({}, (0, 4), id="the same"),
        pytest.param({"max_duration": "4ep"}, (4, 8), id="another max_duration"),
        pytest.param({"duration": "1ep"}, (2, 6), id="fit(duration)"),
    ],
)
def test_who_asks_for_more_gets_it_after_a_stop(tmp_path, settings, expected, saved):
    """Training went on where nobody had asked for it, and must still do so where somebody does."""
    folder = str(tmp_path / "run")
    start(folder, [StopAt(Event.EPOCH_END, STOP_AT)])
    how = {"load_path": f"{folder}/ep2-ba4-rank0.pt", "autoresume": False, "save_folder": None} if saved else {}
    assert start(folder, **settings, **how) == expected


def test_a_stop_is_forgotten_once_training_goes_on(tmp_path):
    """A run that was asked to go on, and then interrupted, would have stayed where it was interrupted."""
    folder = str(tmp_path)
    start(folder, [StopAt(Event.EPOCH_END, STOP_AT)])
    assert start(folder, duration="1ba") == (1, 5)
    assert start(folder) == (15, 20)


def test_a_stop_that_ends_only_the_job_lets_the_next_job_go_on(tmp_path):
    """A callback with a time limit has no other way to end a job, and what it ends is not over."""
    stopper = StopAt(Event.BATCH_END, 3, resumable=True)
    assert start(str(tmp_path), [stopper]) == (3, 3)
    assert start(str(tmp_path)) == (17, 20)


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_a_stop_is_kept_where_the_data_and_the_schedule_come_with_fit(tmp_path, ratio):
    """The duration is scaled only then, and training would have gone on if the stop were compared before."""

    def run(callbacks=()):
        torch.manual_seed(0)
        model = ComposerClassifier(nn.Linear(3, 2), num_classes=2)
        loader = DataLoader(TensorDataset(torch.randn(4, 3), torch.zeros(4, dtype=torch.long)), 2)
        trained = Trained()
        with Trainer(
            model=model,
            max_duration="10ep",
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            schedulers=lambda state, ssr=1.0: 1.0,
            scale_schedule_ratio=ratio,
            callbacks=[*callbacks, trained],
            run_name="plum",
            save_folder=str(tmp_path),
            autoresume=True,
            device="cpu",
            progress_bar=False,
        ) as trainer:
            if trainer.state.timestamp < trainer.state.max_duration:
                trainer.fit(train_dataloader=loader)
        return trained.batches

    assert [run([StopAt(Event.EPOCH_END, STOP_AT)]), run()] == [STOP_AT, 0]


def test_the_last_checkpoint_of_a_stopped_run_has_the_average(tmp_path):
    """What was saved once more for the stop would have had the weights without the average that others have."""
    algorithm = EMA(half_life="2ba", update_interval="1ba")
    start(str(tmp_path), [StopAt(Event.EPOCH_END, STOP_AT)], algorithms=algorithm, save_interval="1ba")
    saved = [load_file(tmp_path / name)["state"]["model"] for name in ("ep1-ba4-rank0.pt", "ep2-ba4-rank0.pt")]
    assert all(torch.equal(value, saved[1][name]) for name, value in saved[0].items())


def stop_on_one_rank(folder, event, rank, is_async, resumable):
    interval = "1ba" if event == Event.BATCH_CHECKPOINT else "3ba"  # a stop during a save comes too late for it
    settings = {"save_interval": interval, "save_async": is_async, "max_duration": "3ep"}
    stopper = StopAt(event, STOP_AT, rank=rank, resumable=resumable)
    return [start(folder, [stopper], **settings), start(folder, **settings)]


@pytest.mark.parametrize(
    ("event", "rank", "is_async", "resumable"),
    [
        (Event.BATCH_END, 1, False, False),
        (Event.BATCH_END, 0, True, False),
        (Event.BATCH_END, 1, False, True),
        (Event.BATCH_CHECKPOINT, 1, False, False),
        (Event.EPOCH_END, 1, False, False),
        (Event.ITERATION_END, 0, False, False),
    ],
)
def test_a_stop_of_one_rank_is_kept_by_all(tmp_path, event, rank, is_async, resumable):
    """What one rank had decided was not in the checkpoint of rank 0, and where no save was due the ranks hung."""
    arguments = (str(tmp_path / "run"), event, rank, is_async, resumable)
    for starts in run_ranks(stop_on_one_rank, *arguments, store=tmp_path / "store"):
        assert starts == [(4, 4), (2, 6) if resumable else (0, 4)]
