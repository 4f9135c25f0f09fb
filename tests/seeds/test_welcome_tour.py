"""The welcome tour, from a plain loop to an engine."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from composer import Algorithm, Callback, Engine, Event, Logger, State, Trainer
from composer import algorithms as library
from composer.functional import mixup_batch
from composer.models import ComposerModel

TOUR = "welcome_tour"
OLD_ENGINE = pytest.mark.filterwarnings("ignore:Engine.state, algorithms=:DeprecationWarning")


class YourModel(ComposerModel):
    """The model that the tour's loops leave to their reader; it keeps what it was called with."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.seen_inputs, self.seen_targets = [], []

    def forward(self, inputs):  # the loops hand it inputs
        self.seen_inputs.append(inputs)
        return self.network(inputs)

    def loss(self, outputs, targets):  # the loops hand it targets, the tour's MixUp a pair of inputs and targets
        if isinstance(targets, tuple):
            _, targets = targets
        self.seen_targets.append(targets)
        return F.cross_entropy(outputs, targets)


@pytest.fixture
def your_model(network):
    return YourModel(network)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_simple_loop_trains_on_the_batches_as_they_are(run, your_model, dataloader):
    before = copy.deepcopy(your_model.state_dict())
    names = {"dataloader": dataloader, "model": your_model, "optimizer": optimizer_of(your_model)}
    run(TOUR, "A simple training loop", NUM_EPOCHS=2, **names)
    assert not any(map(torch.equal, before.values(), your_model.state_dict().values()))
    assert all(map(torch.equal, your_model.seen_inputs, [inputs for inputs, _ in dataloader] * 2))


def test_the_loop_with_mixup_trains_on_blended_batches(run, your_model, dataloader):
    names = {"dataloader": dataloader, "model": your_model, "optimizer": optimizer_of(your_model)}
    run(TOUR, "MixUp in the loop", NUM_EPOCHS=2, **names)
    assert not any(map(torch.equal, your_model.seen_inputs, [inputs for inputs, _ in dataloader] * 2))


class Names(Callback):
    """Keeps the name of every event."""

    def __init__(self):
        self.seen = []

    def run_event(self, event, state, logger):
        self.seen.append(event.name)


def epoch_after_epoch(dataloader):
    """Yield batches as the tour asks for them, whose epochs end with None."""
    while True:
        yield from dataloader
        yield None


def test_the_loop_has_the_events_of_the_trainer_in_their_order(text, run, your_model, model, dataloader):
    names = {"model": your_model, "optimizer": optimizer_of(your_model), "NUM_EPOCHS": 2}
    run(TOUR, "Where the events are", **names, dataloader=epoch_after_epoch(dataloader))
    assert len(your_model.seen_inputs) == 6

    tour = []
    calls = re.sub(r"# <(\w+)>", r"tour.append('\1')", text(TOUR, "Where the events are"))
    exec(calls, {**names, "dataloader": epoch_after_epoch(dataloader), "tour": tour})
    callback = Names()
    loop = {"train_dataloader": dataloader, "optimizers": optimizer_of(model), "max_duration": "2ep"}
    with Trainer(model=model, callbacks=callback, device="cpu", progress_bar=False, **loop) as trainer:
        trainer.fit()
    assert tour == [name for name in callback.seen if name in tour]


@pytest.fixture
def mixup_of_the_tour(run):
    names = {"Algorithm": Algorithm, "Event": Event, "Logger": Logger, "State": State, "mixup_batch": mixup_batch}
    return run(TOUR, "MixUp as an algorithm", **names)["MixUp"]


@pytest.fixture
def train_by_events(run, your_model, dataloader):
    """Run the tour's own trainer with an algorithm."""

    def train(MixUp):
        names = {"Engine": Engine, "State": State, "torch": torch, "NUM_EPOCHS": 2, "MixUp": MixUp}
        run(TOUR, "A loop of events", **names, your_model=your_model, your_dataloader=dataloader, dataloader=dataloader)

    return train


@OLD_ENGINE
def test_the_loop_of_events_trains_as_the_loop_with_mixup_does(
    text, train_by_events, mixup_of_the_tour, your_model, dataloader
):
    model = copy.deepcopy(your_model)
    torch.manual_seed(1)
    train_by_events(mixup_of_the_tour)

    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.manual_seed(1)
    # The loop of events steps a scheduler, and drops no gradients.
    names = {"optimizer": SimpleNamespace(step=optimizer.step, zero_grad=scheduler.step), "dataloader": dataloader}
    exec(text(TOUR, "MixUp in the loop"), {**names, "model": model, "NUM_EPOCHS": 2})
    torch.testing.assert_close(your_model.state_dict(), model.state_dict())


@OLD_ENGINE
def test_the_loop_of_events_does_not_pretend_to_train_without_an_optimizer(
    documents, mixup_of_the_tour, your_model, dataloader
):
    _, as_published = documents[TOUR]["A loop of events"]
    names = {"Engine": Engine, "State": State, "MixUp": mixup_of_the_tour, "NUM_EPOCHS": 2}
    with pytest.raises(RuntimeError, match=r"state\.optimizers=\[\] has nothing to step.*Set one before training"):
        exec(as_published, {**names, "your_model": your_model, "your_dataloader": dataloader, "dataloader": dataloader})


@OLD_ENGINE
@pytest.mark.parametrize("interpolate_loss", [False, True])
def test_the_loop_of_events_trains_with_the_mixup_of_the_library(
    train_by_events, your_model, dataloader, interpolate_loss
):
    train_by_events(lambda: library.MixUp(alpha=1.0, interpolate_loss=interpolate_loss))
    plain_inputs, plain_targets = map(list, zip(*[*dataloader, *dataloader], strict=True))
    assert not any(map(torch.equal, your_model.seen_inputs, plain_inputs))
    if interpolate_loss:  # the loss of the batch's own targets, then that of the others'
        assert all(map(torch.equal, your_model.seen_targets[::2], plain_targets))
    else:
        assert all(targets.shape == (4, 10) for targets in your_model.seen_targets)


def test_the_mixup_of_the_tour_works_in_the_trainer(model, dataloader, mixup_of_the_tour):
    # By chance a batch may also be blended with nothing.
    loop = {"train_dataloader": dataloader, "optimizers": optimizer_of(model), "max_duration": "2ep", "seed": 17}
    blended = []
    model.register_forward_pre_hook(lambda _, batch: blended.append(batch[0][0]))
    with Trainer(model=model, algorithms=mixup_of_the_tour(), device="cpu", progress_bar=False, **loop) as trainer:
        trainer.fit()
    assert not any(map(torch.equal, blended, [inputs for inputs, _ in dataloader] * 2))
