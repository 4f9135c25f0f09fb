"""Squeeze-and-excitation against its equations, and which convolutions get it."""

import pytest
import torch
from torch import nn

from composer_algorithms import SqueezeExcite
from composer_algorithms.functional import apply_squeeze_excite
from composer_algorithms.squeeze_excite import SqueezeExcite2d, SqueezeExciteConv2d
from composer_events import Event, State


def convnet():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))


def test_channels_are_scaled_by_what_the_paper_says():
    layer, x = SqueezeExcite2d(6, latent_channels=2), torch.randn(3, 6, 4, 5)
    first, second = (parameter.double() for parameter in layer.parameters())
    squeezed = torch.tensor([[x[n, c].double().sum() / 20 for c in range(6)] for n in range(3)])
    hidden = (squeezed @ first.T).clamp_min(0)
    scale = 1 / (1 + torch.exp(-(hidden @ second.T)))
    torch.testing.assert_close(layer(x).double(), x.double() * scale[:, :, None, None], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("latent", "expected"), [(0.125, 2), (0.5, 8), (3, 3), (7.9, 7), (0.01, 1)])
def test_the_hidden_layer_has_a_number_of_channels_or_a_share(latent, expected):
    layer = SqueezeExcite2d(16, latent)
    assert [tuple(p.shape) for p in layer.parameters()] == [(expected, 16), (16, expected)]


def test_a_convolution_of_its_own_or_a_given_one_comes_first():
    conv = nn.Conv2d(3, 8, 3)
    layer = SqueezeExciteConv2d(conv=conv, latent_channels=2)
    x = torch.rand(1, 3, 6, 6)
    assert layer.conv is conv
    assert torch.equal(layer(x), layer.se(conv(x)))
    assert SqueezeExciteConv2d(3, 8, 3, padding=1)(x).shape == (1, 8, 6, 6)


def test_wide_convolutions_are_wrapped_and_stay_the_same_objects():
    model = convnet()
    convs = [model[0], model[1], model[3]]
    apply_squeeze_excite(model, latent_channels=4, min_channels=8)
    assert model[0] is convs[0]
    assert model[1].conv is convs[1]
    assert model[3].conv is convs[2]


def test_new_parameters_join_the_group_of_their_convolution():
    model = convnet()
    optimizer = torch.optim.SGD([{"params": model[:2].parameters()}, {"params": model[2:].parameters()}], lr=0.1)
    apply_squeeze_excite(model, latent_channels=4, min_channels=8, optimizers=optimizer)
    for group, layers in zip(optimizer.param_groups, (model[:2], model[2:]), strict=True):
        assert {id(p) for p in group["params"]} == {id(p) for p in layers.parameters()}


def test_twice_is_once():
    model = convnet()
    apply_squeeze_excite(model, min_channels=8)
    once = str(model)
    apply_squeeze_excite(model, min_channels=8)
    assert str(model) == once


def test_dtype_and_memory_format_are_those_of_the_convolution():
    model = convnet().to(torch.bfloat16)
    apply_squeeze_excite(model, latent_channels=4, min_channels=8)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(torch.rand(1, 3, 12, 12, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_model_without_wide_convolutions_is_logged(caplog):
    apply_squeeze_excite(convnet())
    assert "SqueezeExcite has no effect on this Sequential" in caplog.text


@pytest.mark.parametrize("latent", [0, -1, float("nan")])
def test_a_hidden_layer_of_no_channels_is_refused(latent):
    for make in (lambda: SqueezeExcite2d(8, latent), lambda: SqueezeExcite(latent)):
        with pytest.raises(ValueError, match=rf"latent_channels={latent!r} is not in \(0, inf"):
            make()


def test_the_algorithm_logs_how_many_layers_there_are():
    class Log:
        def log_hyperparameters(self, parameters):
            self.parameters = parameters

    state, log = State(convnet(), rank_zero_seed=0, max_duration="1ep"), Log()
    SqueezeExcite(latent_channels=4, min_channels=8).apply(Event.INIT, state, log)
    assert log.parameters == {"squeeze_excite/num_squeeze_excite_layers": 2}
