"""Small real parts that the tests of the Trainer share."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer.core import Event
from composer.loggers import LoggerDestination
from composer.models import ComposerClassifier


class Recorder(LoggerDestination):
    """Writes down, in order, every event and every call that logs."""

    def __init__(self):
        self.seen = []

    def run_event(self, event, state, logger):
        self.seen.append(event.name)

    def log_hyperparameters(self, hyperparameters):
        self.seen.append(("H", tuple(hyperparameters)))

    def log_metrics(self, metrics, step=None):
        self.seen.append(("M", step, tuple(metrics)))

    def events(self):
        return [entry for entry in self.seen if isinstance(entry, str)]

    def count(self, event: Event):
        return self.seen.count(event.name)


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def make_data():
    """Make `n` random points of two features in two classes, always the same ones."""

    def make(n, seed=0):
        points = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
        return TensorDataset(points, (points.sum(dim=1) > 0).long())

    return make


@pytest.fixture
def make_loader(make_data):
    def make(n, batch_size, **settings):
        return DataLoader(make_data(n), batch_size=batch_size, **settings)

    return make


@pytest.fixture
def make_model():
    def make(seed=0):
        torch.manual_seed(seed)
        return ComposerClassifier(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)), num_classes=2)

    return make


@pytest.fixture
def make_trainer(make_model, make_loader):
    """Make a Trainer on the CPU without a progress bar, closed when the test ends."""
    from composer import Trainer

    trainers = []

    def make(**settings):
        model = settings.pop("model", None)
        model = make_model() if model is None else model
        settings.setdefault("optimizers", torch.optim.SGD(model.parameters(), lr=0.1))
        settings.setdefault("train_dataloader", make_loader(8, 4))
        trainer = Trainer(model=model, **{"device": "cpu", "progress_bar": False, "seed": 3, **settings})
        trainers.append(trainer)
        return trainer

    yield make
    for trainer in trainers:
        trainer.close()
