"""Standardized filters against mean and variance in double precision, and which convolutions have them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from composer_algorithms import WeightStandardization
from composer_algorithms.functional import apply_blurpool, apply_weight_standardization
from composer_events import Event, State


class Reversed(nn.Module):
    """Runs its convolutions in the opposite order of their registration."""

    def __init__(self, traceable=True):
        super().__init__()
        self.c, self.b, self.a = (nn.Conv2d(4, 4, 1) for _ in range(3))
        self.traceable = traceable

    def forward(self, x):
        if not self.traceable and x.sum() > 0:
            x = -x
        return self.c(self.b(self.a(x)))


def is_standardized(conv):
    return parametrize.is_parametrized(conv, "weight")


@pytest.mark.parametrize("conv", [nn.Conv1d(3, 5, 4), nn.Conv2d(3, 5, (2, 3)), nn.Conv3d(3, 5, 2, groups=1)])
def test_each_filter_has_the_formulas_value(conv):
    original = conv.weight
    assert apply_weight_standardization(conv) == 1
    flat = original.detach().double().flatten(1)
    mean = flat.mean(1, keepdim=True)
    variance = ((flat - mean) ** 2).mean(1, keepdim=True)
    expected = ((flat - mean) / (variance + 1e-10).sqrt()).view_as(original)
    torch.testing.assert_close(conv.weight.double(), expected, atol=1e-5, rtol=0)  # float32
    assert conv.parametrizations.weight.original is original


def test_channels_last_filters_have_the_same_values_and_stay_channels_last():
    plain, last = nn.Conv2d(8, 6, 3), nn.Conv2d(8, 6, 3)
    last.load_state_dict(plain.state_dict())
    last.to(memory_format=torch.channels_last)
    for conv in (plain, last):
        apply_weight_standardization(conv)
    torch.testing.assert_close(last.weight, plain.weight, atol=1e-5, rtol=0)
    assert last.weight.is_contiguous(memory_format=torch.channels_last)


def test_gradients_reach_the_weights_through_the_formula():
    conv = nn.Conv2d(2, 3, 2).double()
    apply_weight_standardization(conv)
    original = conv.parametrizations.weight.original
    assert torch.autograd.gradcheck(conv.parametrizations.weight[0], (original,))


@pytest.mark.parametrize("traceable", [True, False])
@pytest.mark.parametrize("ignored", [0, 1, 2, 3, 4])
def test_the_last_ones_to_run_are_left_alone(traceable, ignored, caplog):
    model = Reversed(traceable)
    assert apply_weight_standardization(model, ignored) == max(3 - ignored, 0)
    order = "abc" if traceable else "cba"  # without a trace the order of registration is all that is known
    expected = [i < 3 - ignored for i in range(3)]
    if 0 < ignored < 3:
        assert [is_standardized(getattr(model, name)) for name in order] == expected
        assert ("cannot trace" in caplog.text) != traceable
    else:
        assert {is_standardized(conv) for conv in model.children()} == {ignored == 0}


def test_convolutions_inside_blurring_ones_are_found():
    model = nn.Sequential(nn.Conv2d(16, 16, 3, stride=2), nn.Conv2d(16, 8, 3))
    apply_blurpool(model)
    assert apply_weight_standardization(model, n_last_layers_ignore=1) == 1
    assert is_standardized(model[0].conv)
    assert not is_standardized(model[1])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(8, 6, 3, 3), (8, 6, 1, 1), (8, 1, 3, 3)])
def test_filters_keep_the_strides_by_which_convolutions_choose_their_kernel(shape, memory_format):
    conv = nn.Conv2d(shape[1], shape[0], shape[2]).to(memory_format=memory_format)
    strides = conv.weight.stride()
    apply_weight_standardization(conv)
    assert nn.functional.conv2d(torch.rand(2, shape[1], 4, 4), conv.weight).shape[1] == shape[0]
    assert conv.weight.stride() == strides


def test_a_parametrization_that_is_added_later_has_the_last_word():
    conv = nn.Conv2d(3, 5, 3)
    apply_weight_standardization(conv)
    standardized = conv.weight
    parametrize.register_parametrization(conv, "weight", nn.Softplus())
    assert torch.equal(conv.weight, nn.functional.softplus(standardized))


def test_a_copy_of_the_model_has_filters_of_its_own():
    model = nn.Sequential(nn.Conv2d(3, 5, 3))
    apply_weight_standardization(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].parametrizations.weight.original[0].neg_()
    assert torch.equal(other[0].weight[1:], model[0].weight[1:])
    torch.testing.assert_close(other[0].weight[0], -model[0].weight[0])


def test_twice_is_once():
    model = nn.Sequential(nn.Conv2d(3, 5, 3))
    assert apply_weight_standardization(model) == apply_weight_standardization(model) == 1
    assert list(model.state_dict()) == ["0.bias", "0.parametrizations.weight.original"]
    assert len(model[0].parametrizations.weight) == 1


def test_other_parametrizations_come_first():
    conv = nn.Conv2d(3, 5, 3)
    parametrize.register_parametrization(conv, "weight", nn.Softplus())
    apply_weight_standardization(conv)
    assert conv.weight.mean(dim=(1, 2, 3)).abs().max() < 1e-5


def test_the_filters_can_be_written_into_the_weight():
    conv = nn.Conv2d(3, 5, 3)
    apply_weight_standardization(conv)
    x = torch.rand(1, 3, 4, 4)
    expected = conv(x)
    parametrize.remove_parametrizations(conv, "weight")
    assert torch.equal(conv(x), expected)


def test_the_algorithm_keeps_the_optimizers_parameters_and_renames_them():
    class Log:
        def log_hyperparameters(self, parameters):
            self.parameters = parameters

    model = nn.Sequential(nn.Conv2d(3, 5, 3))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    state, log = State(model, rank_zero_seed=0, max_duration="1ep", optimizers=optimizer), Log()
    WeightStandardization().apply(Event.INIT, state, log)
    assert log.parameters == {"WeightStandardization/num_weights_standardized": 1}
    names = dict(zip(optimizer.param_groups[0]["param_names"], optimizer.param_groups[0]["params"], strict=True))
    assert all(names[name] is parameter for name, parameter in model.named_parameters())


def test_a_negative_number_and_a_convolution_without_a_weight_are_refused(caplog):
    with pytest.raises(ValueError, match="n_last_layers_ignore=-1"):
        WeightStandardization(-1)
    with pytest.raises(ValueError, match=r"'0' is a LazyConv2d that has no weight yet"):
        apply_weight_standardization(nn.Sequential(nn.LazyConv2d(3, 3)))
    assert apply_weight_standardization(nn.Linear(1, 1)) == 0
    assert "no effect on this Linear" in caplog.text
