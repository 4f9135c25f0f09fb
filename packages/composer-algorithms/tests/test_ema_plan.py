"""Updates of an average remember what belongs together, and notice when that changes."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from composer_algorithms.ema import EMAParameters, compute_ema


def model_and_average():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 1)))
    average = EMAParameters(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    compute_ema(model, average, 0.5)
    return model, average


def replace_parameter(model, average):
    model[0].weight = nn.Parameter(torch.full((2, 2), 7.0))
    return model


def replace_module(model, average):
    model[2] = nn.Sequential(nn.Linear(2, 1))
    return model


def replace_buffer(model, average):
    model[1].running_mean = torch.full((2,), 7.0)
    return model


def convert(model, average):
    return model.double()


def copied(model, average):
    other = copy.deepcopy(model)
    nn.init.constant_(other[0].weight, 7.0)
    return other


def swapped(model, average):
    average.swap_params(model)
    return model


def replaced_in_average(model, average):
    average.named_parameters_dict["0.weight"] = torch.full((2, 2), 3.0)
    return model


CHANGES = [replace_parameter, replace_module, replace_buffer, convert, copied, swapped, replaced_in_average]


@pytest.mark.parametrize("change", CHANGES)
def test_an_update_follows_what_has_changed_since_the_last(change):
    model, average = model_and_average()
    model = change(model, average)
    own = {**model.state_dict()}
    expected = {name: 0.25 * t.double() + 0.75 * own[name] for name, t in average.named_parameters()}
    expected |= {n: 0.25 * t.double() + 0.75 * own[n] for n, t in average.named_buffers() if t.is_floating_point()}
    compute_ema(model, average, 0.25)
    found = {**average.named_parameters_dict, **average.named_buffers_dict}
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].double(), tensor.double())


def test_an_average_can_be_copied_and_does_not_keep_a_model_alive():
    model, average = model_and_average()
    other = copy.deepcopy(average)
    compute_ema(model, other, 0.5)
    compute_ema(model, average, 0.5)
    torch.testing.assert_close(other.named_parameters_dict, average.named_parameters_dict)
    gone = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert gone() is None
