import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MeanAbsoluteError, MeanSquaredError

from composer_models import ComposerModel


class Sum(nn.Module):
    def forward(self, left, right):
        return left + right


def test_outputs_and_loss_are_those_of_the_module_and_the_function():
    module = nn.Linear(3, 2)
    model = ComposerModel.from_module(module, F.cross_entropy)
    batch = torch.rand(4, 3), torch.tensor([0, 1, 1, 0])
    assert torch.equal(model(batch), module(batch[0]))
    assert torch.equal(model.loss(model(batch), batch), F.cross_entropy(module(batch[0]), batch[1]))


def test_keys_say_where_a_batch_has_inputs_and_targets():
    model = ComposerModel.from_module(nn.Identity(), F.mse_loss, input_key="x", target_key=lambda b: b["y"] + 1)
    batch = {"x": torch.tensor([2.0]), "y": torch.tensor([1.0])}
    assert model.loss(model(batch), batch) == 0


def test_several_keys_are_positional_arguments():
    model = ComposerModel.from_module(Sum(), F.mse_loss, input_key=["a", "b"], target_key="c")
    assert model({"a": torch.tensor(1), "b": torch.tensor(2)}) == 3


def test_a_mapping_of_inputs_is_passed_as_keywords():
    model = ComposerModel.from_module(Sum(), F.mse_loss)
    assert model(({"left": torch.tensor(1), "right": torch.tensor(2)}, None)) == 3


def test_metrics_are_for_evaluation_and_train_metrics_for_training():
    metrics, train_metrics = [MeanSquaredError(), MeanAbsoluteError()], {"error": MeanSquaredError()}
    model = ComposerModel.from_module(nn.Identity(), F.mse_loss, metrics, train_metrics=train_metrics)
    assert list(model.get_metrics(is_train=True)) == ["error"]
    assert list(model.get_metrics(is_train=False)) == ["MeanSquaredError", "MeanAbsoluteError"]


@pytest.mark.parametrize("name", ["train", "top.1", "items", "type", "", "metrics/eval/mse"])
def test_metrics_may_have_any_name(name):
    metric = MeanSquaredError()
    model = ComposerModel.from_module(nn.Identity(), F.mse_loss, {name: metric}, train_metrics={name: metric})
    assert model.get_metrics(is_train=True) == model.get_metrics(is_train=False) == {name: metric}
    assert model.train() is model


def test_metrics_may_come_in_a_module_dict():
    metrics = nn.ModuleDict({"b": MeanSquaredError(), "a": MeanAbsoluteError()})
    model = ComposerModel.from_module(nn.Identity(), F.mse_loss, metrics)
    assert list(model.get_metrics(is_train=False).items()) == list(metrics.items())


def test_metrics_follow_the_model_to_its_device_and_into_copies():
    model = ComposerModel.from_module(nn.Identity(), F.mse_loss, {"top.1": MeanSquaredError()})
    assert model.to("meta").get_metrics(is_train=False)["top.1"].device.type == "meta"
    assert list(copy.deepcopy(model).get_metrics(is_train=False)) == ["top.1"]


def test_metrics_see_outputs_and_targets():
    model = ComposerModel.from_module(nn.Identity(), F.mse_loss, MeanSquaredError())
    (metric,) = model.get_metrics(is_train=False).values()
    batch = torch.tensor([1.0, 3.0]), torch.tensor([1.0, 0.0])
    model.update_metric(batch, model.eval_forward(batch), metric)
    assert metric.compute() == 4.5


def test_the_state_dict_is_the_modules_under_one_prefix():
    model = ComposerModel.from_module(nn.Linear(1, 1), F.mse_loss, MeanSquaredError())
    assert list(model.state_dict()) == ["module.weight", "module.bias"]


@pytest.mark.parametrize(
    ("module", "loss_fn", "message"),
    [
        (nn.Linear, F.mse_loss, "must be a torch.nn.Module"),
        (ComposerModel.from_module(nn.Identity(), F.mse_loss), F.mse_loss, "not a ComposerModel already"),
        (nn.Identity(), "mse", "loss_fn='mse' must be a function"),
        (nn.Identity(), nn.MSELoss, r"Of a class, such as MSELoss, pass an instance"),
    ],
)
def test_wrong_kinds_are_refused(module, loss_fn, message):
    with pytest.raises(TypeError, match=message):
        ComposerModel.from_module(module, loss_fn)


def test_two_nameless_metrics_of_one_class_are_refused():
    with pytest.raises(ValueError, match="two of class MeanSquaredError"):
        ComposerModel.from_module(nn.Identity(), F.mse_loss, [MeanSquaredError(), MeanSquaredError()])


def test_what_is_no_metric_is_refused():
    with pytest.raises(TypeError, match=r"under 'mse', which is not a torchmetrics\.Metric"):
        ComposerModel.from_module(nn.Identity(), F.mse_loss, {"mse": F.mse_loss})
