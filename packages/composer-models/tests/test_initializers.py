import math

import pytest
import torch
from torch import nn

from composer_models import Initializer


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(64, 128))


# Conv2d(3, 64, 3) has 27 inputs and 576 outputs a weight, Linear(64, 128) has 64 and 128.
@pytest.mark.parametrize(
    ("name", "conv_std", "linear_std"),
    [
        ("kaiming_normal", math.sqrt(2 / 27), math.sqrt(2 / 64)),
        ("kaiming_uniform", math.sqrt(2 / 27), math.sqrt(2 / 64)),
        ("xavier_normal", math.sqrt(2 / (27 + 576)), math.sqrt(2 / (64 + 128))),
        ("xavier_uniform", math.sqrt(2 / (27 + 576)), math.sqrt(2 / (64 + 128))),
    ],
)
def test_weights_get_the_spread_of_the_paper(model, name, conv_std, linear_std):
    biases = [model[0].bias.clone(), model[3].bias.clone()]
    model.apply(Initializer(name).get_initializer())
    # 1728 and 8192 samples: the standard deviation is known to within a few percent.
    assert model[0].weight.std().item() == pytest.approx(conv_std, rel=0.1)
    assert model[3].weight.std().item() == pytest.approx(linear_std, rel=0.05)
    assert torch.equal(model[0].bias, biases[0])
    assert torch.equal(model[3].bias, biases[1])


@pytest.mark.parametrize("name", ["kaiming_uniform", "xavier_uniform"])
def test_uniform_weights_stay_within_root_three_of_their_spread(model, name):
    model.apply(Initializer(name).get_initializer())
    weight = model[3].weight
    assert weight.abs().max() <= math.sqrt(3) * 1.05 * weight.std()


def test_batch_norms_start_at_one_and_zero(model):
    nn.init.normal_(model[1].weight)
    nn.init.normal_(model[1].bias)
    model.apply(Initializer.BN_ONES.get_initializer())
    assert (model[1].weight == 1).all()
    assert (model[1].bias == 0).all()


def test_batch_norms_start_uniform(model):
    model.apply(Initializer.BN_UNIFORM.get_initializer())
    weight = model[1].weight
    assert ((weight >= 0) & (weight < 1)).all()
    assert weight.unique().numel() > 32
    assert (model[1].bias == 0).all()


def test_linear_biases_start_at_the_log_of_equal_shares(model):
    conv_bias = model[0].bias.clone()
    model.apply(Initializer.LINEAR_LOG_CONSTANT_BIAS.get_initializer())
    torch.testing.assert_close(model[3].bias.exp(), torch.full((128,), 1 / 128))
    assert torch.equal(model[0].bias, conv_bias)


@pytest.mark.parametrize("initializer", list(Initializer))
def test_layers_without_the_parameter_are_left_alone(initializer):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm2d(2, affine=False), nn.ReLU())
    model.apply(initializer.get_initializer())


def test_an_unknown_initializer_is_refused():
    with pytest.raises(ValueError, match="zeros"):
        Initializer("zeros")
