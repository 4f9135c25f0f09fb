import pytest
import torch
from torch import nn

from composer_fsdp.state_dicts import check_optimizers, names_of_parameters, rebuild, sync_optimizer_and_model_params


def replaced(model):
    """Give a model other parameters under the same names, as sharding does."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(parameter.detach().clone()))


def test_groups_go_on_with_the_parameters_of_the_same_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": list(model[1].parameters()), "lr": 0.1}, {"params": [model[0].bias], "lr": 0.2}]
    optimizer = torch.optim.SGD(groups)
    with sync_optimizer_and_model_params(optimizer, model):
        replaced(model)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    after = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    assert after == [[id(model[1].weight), id(model[1].bias)], [id(model[0].bias)]]


def test_a_tied_parameter_is_found_by_its_first_name():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = names_of_parameters(model)
    model[0].weight = model[1].weight = nn.Parameter(torch.zeros(2, 2))
    rebuild([optimizer], names, model)
    assert optimizer.param_groups[0]["params"] == [model[0].weight]


def test_a_state_from_before_is_dropped_with_a_warning():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="Optimizer state will be cleared"):
        rebuild([optimizer], names_of_parameters(model), model)
    assert not optimizer.state


def test_parameters_of_another_model_are_refused_with_their_names():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([other.weight, model.bias], lr=0.1)
    with pytest.raises(ValueError, match="The same model must be passed to the optimizer and trainer") as refusal:
        check_optimizers([optimizer], names_of_parameters(model))
    assert f"optimizer.param_id.{id(other.weight)}" in str(refusal.value)
    assert "model.param_name.weight" in str(refusal.value)


def test_optimizers_that_cannot_go_on_are_refused():
    model = nn.Linear(2, 2)
    names = names_of_parameters(model)
    whole = torch.optim.SGD(model.parameters(), lr=0.1)
    part = torch.optim.SGD([model.weight], lr=0.1)
    groups = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    check_optimizers([part], names)
    check_optimizers([groups], names)
    check_optimizers([whole], names, use_orig_params=False, splits_tensors=True)
    check_optimizers([part, torch.optim.AdamW([model.bias])], names)
    with pytest.raises(ValueError, match="Adafactor keeps statistics"):
        check_optimizers([torch.optim.Adafactor(model.parameters())], names)
    for settings, text in (
        ({"use_orig_params": False}, "with FSDP are not supported with use_orig_params=False."),
        ({"splits_tensors": True}, "are not supported with tensor parallelism."),
    ):
        with pytest.raises(RuntimeError, match=f"Multiple optimizer groups {text}"):
            check_optimizers([groups], names, **settings)
    for settings, text in (
        ({"use_orig_params": False}, "use_orig_params=False."),
        ({"splits_tensors": True}, "tensor parallelism."),
    ):
        subset = "Passing in a subset of model parameters to the optimizer is not supported with"
        with pytest.raises(ValueError, match=f"{subset} {text}"):
            check_optimizers([part], names, **settings)
