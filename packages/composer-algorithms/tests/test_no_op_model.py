"""The model is gone, one parameter is trained, and any batch will do."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from composer_algorithms import NoOpModel
from composer_algorithms.no_op_model import NoOpModelClass
from composer_events import Event, State


def test_outputs_are_the_scaled_targets_and_the_loss_their_distance():
    model, targets = NoOpModelClass(nn.Linear(2, 2)), torch.tensor([0, 2, 4])
    batch = (torch.rand(3, 2), targets)
    outputs = model(batch)
    assert outputs.tolist() == [0, 3, 6]
    assert model.loss(outputs, batch).item() == pytest.approx((0 + 1 + 4) / 3)
    assert torch.equal(model.eval_forward(batch), targets)


def test_the_number_of_classes_is_kept():
    module = nn.Linear(2, 2)
    module.num_classes = 7
    assert NoOpModelClass(module).num_classes == 7
    assert not hasattr(NoOpModelClass(nn.Linear(2, 2)), "num_classes")


@pytest.mark.parametrize("batch", [torch.ones(2), {"a": "text", "ids": torch.ones(2)}, ([torch.ones(2)], "text")])
def test_any_batch_with_a_tensor_works(batch):
    assert NoOpModelClass(nn.Linear(1, 1))(batch).tolist() == [1.5, 1.5]


def test_a_batch_without_a_tensor_is_refused():
    with pytest.raises(TypeError, match="a batch of type dict contains no tensor"):
        NoOpModelClass(nn.Linear(1, 1))({"a": 1})


def test_metrics_can_be_updated_with_any_targets():
    model = NoOpModelClass(nn.Linear(1, 1))
    metric = model.get_metrics(is_train=False)["BinaryAccuracy"]
    model.update_metric((torch.rand(3), torch.tensor([0, 5, 1])), torch.rand(3), metric)
    assert metric.compute() == 1


@pytest.mark.parametrize("named", [False, True])
def test_the_optimizer_trains_its_parameter_only(named):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": list(one.named_parameters() if named else one.parameters())} for one in model]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    model(torch.rand(1, 2)).sum().backward()
    optimizer.step()
    state = State(model, rank_zero_seed=0, max_duration="1ep", optimizers=optimizer)
    NoOpModel().apply(Event.INIT, state, None)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0]
    assert not optimizer.state
    batch = (torch.rand(2), torch.tensor([1.0, 2.0]))
    before = state.model.weights.item()
    state.model.loss(state.model(batch), batch).backward()
    optimizer.step()
    assert state.model.weights.item() < before
    kept = state.model
    NoOpModel().apply(Event.INIT, state, None)
    assert state.model is kept


def test_it_acts_on_init_and_says_how_it_was_made():
    assert [event for event in Event if NoOpModel().match(event, SimpleNamespace())] == [Event.INIT]
    assert repr(NoOpModel()) == "NoOpModel()"
    assert NoOpModel.required_on_load()
