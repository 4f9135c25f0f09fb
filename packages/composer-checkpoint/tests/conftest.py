"""A small training loop of events, which the tests of saving and loading a training state share."""

from multiprocessing import forkserver

import pytest
import torch
from hypothesis import settings

from composer_checkpoint import CheckpointSaver
from composer_events import Engine, Event, State

# A deadline would measure how busy the machine is.
settings.register_profile("house", deadline=None)
settings.load_profile("house")

# What the ranks of most tests load: in the server from which they are forked, it is loaded once.
PRELOADED = [
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "fsspec.implementations.local",
    "pytest",
    "composer_events",
    *(f"composer_checkpoint.{name}" for name in ("resume", "loader", "modular.load", "saver", "sharded", "stores")),
]


def pytest_collection_finish(session):
    """Start that server before the first test starts it with less, if any test will need it."""
    if any(hasattr(getattr(item, "module", None), "run_ranks") for item in session.items):
        forkserver.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()


class Loop:
    """Trains a small model by events, as a loop of one's own does."""

    def __init__(self, callbacks, max_duration, num_batches, **settings):
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(self.layer.parameters(), lr=0.1)
        settings = {"model": self.layer, "optimizers": optimizer, **settings}
        loader = settings.pop("train_dataloader", [torch.full((1, 2), float(i + 1)) for i in range(num_batches)])
        self.state = State(
            rank_zero_seed=1,
            run_name="plum",
            device="cpu",
            max_duration=max_duration,
            dataloader=loader,
            train_dataloader=loader,
            callbacks=callbacks,
            **settings,
        )
        self.engine = Engine(self.state)
        self.engine.run_event(Event.INIT)

    def fit(self, on_batch=None):
        state, run_event = self.state, self.engine.run_event
        run_event(Event.FIT_START)
        while state.timestamp < state.max_duration:
            for batch in state.dataloader:
                state.batch = batch
                run_event(Event.BATCH_START)
                state.optimizers[0].zero_grad()
                state.model(state.batch).sum().backward()
                run_event(Event.AFTER_TRAIN_BATCH)
                state.optimizers[0].step()
                state.previous_timestamp = state.timestamp
                state.timestamp = state.timestamp.to_next_batch(samples=1)
                run_event(Event.BATCH_END)
                if on_batch is not None:
                    on_batch(state)
                run_event(Event.BATCH_CHECKPOINT)
                if not state.timestamp < state.max_duration:
                    break
            if int(state.timestamp.batch_in_epoch) == len(state.dataloader):
                state.previous_timestamp = state.timestamp
                state.timestamp = state.timestamp.to_next_epoch()
                run_event(Event.EPOCH_END)
                run_event(Event.EPOCH_CHECKPOINT)
        run_event(Event.FIT_END)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()


@pytest.fixture
def loop():
    """Make a loop; it is closed when the test ends."""
    loops = []

    def make(callbacks=(), max_duration="3ep", num_batches=2, **settings):
        loops.append(Loop(list(callbacks), max_duration, num_batches, **settings))
        return loops[-1]

    yield make
    for each in loops:
        each.engine.close()


@pytest.fixture
def saver(tmp_path):
    """Make a saver to the folder `checkpoints`."""

    def make(filename="ep{epoch}-ba{batch}-rank{rank}.pt", **settings):
        return CheckpointSaver(str(tmp_path / "checkpoints"), filename, **settings)

    return make
