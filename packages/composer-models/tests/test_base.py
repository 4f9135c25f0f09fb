import copy
import pickle

import pytest
import torch
from torch import nn
from torchmetrics import MeanSquaredError

from composer_models import ComposerModel


class Regression(ComposerModel):
    def __init__(self):
        self.num_features = 3  # models in the wild set plain attributes before the base is ready
        super().__init__()
        self.linear = nn.Linear(self.num_features, 1)

    def forward(self, batch):
        return self.linear(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch[1])


@pytest.fixture
def batch():
    return torch.ones(4, 3), torch.zeros(4, 1)


def test_a_subclass_must_define_forward_and_loss():
    class Half(ComposerModel):
        def forward(self, batch): ...

    with pytest.raises(TypeError, match="loss"):
        Half()


def test_eval_forward_computes_outputs_only_if_there_are_none(batch):
    model = Regression()
    assert torch.equal(model.eval_forward(batch), model(batch))
    given = torch.zeros(4, 1)
    assert model.eval_forward(batch, given) is given


def test_a_model_has_no_metrics_by_default():
    assert Regression().get_metrics(is_train=True) == {}


def test_metrics_without_update_metric_are_an_error_that_names_the_class(batch):
    with pytest.raises(NotImplementedError, match="Regression has metrics and no update_metric"):
        Regression().update_metric(batch, None, MeanSquaredError())


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy])
def test_a_copy_shares_the_logger(copier):
    model = Regression()
    model.logger = object()
    assert copier(model).logger is model.logger


def test_a_pickle_leaves_the_logger_out():
    model = ComposerModel.from_module(nn.Linear(3, 1), nn.functional.mse_loss)
    model.logger = lambda: "cannot be pickled"
    again = pickle.loads(pickle.dumps(model))
    assert again.logger is None
    assert torch.equal(again.module.weight, model.module.weight)
    assert model.logger() == "cannot be pickled"


def test_a_deep_copy_has_weights_of_its_own(batch):
    model = Regression()
    copied = copy.deepcopy(model)
    assert copied.linear.weight is not model.linear.weight
    assert torch.equal(copied(batch), model(batch))


def test_a_deep_copy_keeps_shared_parameters_shared():
    model = Regression()
    model.tied = model.linear
    copied = copy.deepcopy(model)
    assert copied.tied is copied.linear


def test_a_submodule_that_holds_the_logger_shares_it_too():
    model = Regression()
    model.logger = model.linear.logger = object()
    assert copy.deepcopy(model).linear.logger is model.logger


def test_a_model_trains_in_a_plain_loop(batch):
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model.loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
