"""What the metrics of training are shown, and over which batches they count."""

import functools
import operator

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric, SumMetric

from composer.algorithms import MixUp
from composer.core import Algorithm, Callback, DataSpec, Event
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel


class Blank(Algorithm):
    """Puts zeros in the place of the inputs, which a path of keys leads to."""

    def __init__(self, path):
        self.path = path

    def match(self, event, state):
        return event == Event.BEFORE_FORWARD

    def apply(self, event, state, logger):
        container = functools.reduce(operator.getitem, self.path[:-1], state.batch)
        container[self.path[-1]] = torch.zeros_like(container[self.path[-1]])


@pytest.fixture
def make_watched_model():
    """Make a model that finds its inputs with a function of the batch, and a list of the batches its metrics see."""

    def make(get_inputs, get_targets):
        seen = []
        model = ComposerModel.from_module(
            nn.Linear(2, 2), cross_entropy, train_metrics=MeanMetric(), input_key=get_inputs, target_key=get_targets
        )
        model.update_metric = lambda batch, outputs, metric: seen.append(batch)
        return model, seen

    return make


def test_where_nobody_listens_the_metrics_of_the_last_batch_are_there_at_the_end(make_trainer, make_model, make_loader):
    model = make_model()
    model.train_metrics = SumMetric()
    model.update_metric = lambda batch, outputs, metric: metric.update(len(batch[1]))
    trainer = make_trainer(model=model, train_dataloader=make_loader(10, 4), max_duration="1ep")
    trainer.fit()
    assert {name: int(value) for name, value in trainer.state.train_metric_values.items()} == {"SumMetric": 2}


def test_train_metrics_count_the_microbatches_of_one_batch(make_trainer, make_model, make_loader, recorder):
    counts = []

    class Counts(Callback):
        def batch_end(self, state, logger):
            counts.append(int(state.train_metric_values["SumMetric"]))

    model = make_model()
    model.train_metrics = SumMetric()
    model.update_metric = lambda batch, outputs, metric: metric.update(len(batch[1]))
    trainer = make_trainer(
        model=model,
        train_dataloader=make_loader(10, 4),
        device_train_microbatch_size=2,
        max_duration="1ep",
        callbacks=Counts(),
        loggers=recorder,  # without a destination no metric is computed
    )
    trainer.fit()
    assert counts == [4, 4, 2]


@pytest.mark.parametrize(
    ("make_batch", "inputs_path"),
    [
        (lambda inputs, targets: {"inputs": inputs, "targets": targets}, ("inputs",)),
        (lambda inputs, targets: [inputs, targets], (0,)),
        (lambda inputs, targets: ({"points": inputs}, targets), (0, "points")),
        (lambda inputs, targets: {"parts": [inputs], "targets": targets}, ("parts", 0)),
    ],
    ids=["dict", "list", "dict in tuple", "list in dict"],
)
def test_train_metrics_see_the_batch_that_an_algorithm_changed_in_place_as_it_was(
    make_trainer, make_watched_model, make_data, make_batch, inputs_path
):
    inputs, targets = make_data(4).tensors
    get_inputs = functools.partial(functools.reduce, operator.getitem, inputs_path)
    model, seen = make_watched_model(get_inputs, lambda batch: targets)
    spec = DataSpec(
        [make_batch(inputs, targets)],
        split_batch=lambda batch, size: [batch],  # the default makes tuples of lists
        get_num_samples_in_batch=lambda batch: 4,
    )
    trainer = make_trainer(
        model=model,
        train_dataloader=spec,
        device_train_microbatch_size=4,
        max_duration="1ba",
        algorithms=Blank(inputs_path),
    )
    trainer.fit()
    assert trainer.state.outputs.unique(dim=0).shape == (1, 2)  # the model saw zeros only
    assert torch.equal(get_inputs(seen[0]), inputs)


def test_train_metrics_see_the_examples_that_mixup_blends_as_they_were(make_trainer, make_watched_model, make_data):
    inputs, targets = make_data(4).tensors
    model, seen = make_watched_model("inputs", "targets")
    trainer = make_trainer(
        model=model,
        train_dataloader=[{"inputs": inputs, "targets": targets}],
        device_train_microbatch_size=4,
        max_duration="1ba",
        algorithms=MixUp(alpha=1.0, input_key="inputs", target_key="targets"),
    )
    trainer.fit()
    assert torch.equal(seen[0]["inputs"], inputs)
    assert torch.equal(seen[0]["targets"], targets)


def test_the_dataloaders_label_is_on_the_state_and_names_nothing_in_the_log(make_trainer, recorder):
    trainer = make_trainer(train_dataloader_label="mine", max_duration="1ba", loggers=recorder)
    trainer.fit()
    logged = {name for entry in recorder.seen if entry[0] == "M" for name in entry[2]}
    assert trainer.state.dataloader_label == "mine"
    assert "metrics/train/MulticlassAccuracy" in logged
    assert not [name for name in logged if "mine" in name]


class InPlace(torch.autograd.Function):
    """Returns a loss in memory that the next microbatch writes to, as the output of a CUDA graph is."""

    @staticmethod
    def forward(ctx, loss, memory):
        memory.data.copy_(loss.data)
        return memory.view_as(memory).detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Zeroes(Callback):
    def after_backward(self, state, logger):
        state.loss.detach().zero_()


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("callbacks", [[], [Zeroes()]], ids=["memory", "callback"])
def test_losses_are_logged_as_they_were_before_their_memory_was_used_again(
    make_trainer, make_model, make_loader, callbacks, num_microbatches
):
    memory, seen, log = torch.zeros(()), [], InMemoryLogger()

    def loss(outputs, batch):
        value = cross_entropy(outputs, batch[1])
        seen.append(value.item())
        return InPlace.apply(value, memory)

    model = make_model()
    model.loss = loss
    make_trainer(
        model=model,
        train_dataloader=make_loader(16, 4),
        max_duration="1ep",
        device_train_microbatch_size=4 // num_microbatches,
        loggers=log,
        callbacks=callbacks,
    ).fit()
    of_batches = torch.tensor(seen).view(-1, num_microbatches).mean(dim=1)
    logged = torch.stack([value for _, value in log.data["loss/train/total"]])
    torch.testing.assert_close(logged, of_batches)
