"""Factorization against the best approximation of a rank, by NumPy's singular values."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composer_algorithms import Factorize
from composer_algorithms.factorize import (
    FactorizedConv2d,
    FactorizedLinear,
    factorize_conv2d,
    factorize_matrix,
    factorizing_could_speedup,
)
from composer_algorithms.functional import apply_factorization
from composer_events import Event, State


def smallest_error(matrix, rank):
    """Return the Frobenius norm of what the best matrix of a rank leaves out (Eckart and Young)."""
    values = np.linalg.svd(matrix.detach().double().numpy(), compute_uv=False)
    return math.sqrt((values[rank:] ** 2).sum())


def problem(num=80, num_in=12, num_out=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(num, num_in, generator=generator), torch.randn(num_in, num_out, generator=generator)
    return x, w


@pytest.mark.parametrize("bias", [False, True])
def test_a_factorized_linear_layer_is_the_best_approximation(bias):
    linear = nn.Linear(24, 16, bias=bias)
    factorized = FactorizedLinear.from_linear(linear, latent_features=5)
    product = factorized.module1.weight @ factorized.module0.weight
    error = (product - linear.weight).double().norm().item()
    assert error == pytest.approx(smallest_error(linear.weight, 5), rel=1e-4)  # float32
    x = torch.rand(3, 24)
    expected = x @ product.T + (linear.bias if bias else 0)
    torch.testing.assert_close(factorized(x), expected)
    assert (factorized.module1.bias is not None) == bias


@pytest.mark.parametrize("settings", [{}, {"stride": 2, "padding": 1, "padding_mode": "circular"}, {"dilation": 2}])
def test_a_factorized_convolution_is_the_best_approximation(settings):
    conv = nn.Conv2d(8, 16, 3, **settings)
    factorized = FactorizedConv2d.from_conv2d(conv, latent_channels=6)
    product = (factorized.module1.weight.flatten(1) @ factorized.module0.weight.flatten(1)).view_as(conv.weight)
    error = (product - conv.weight).double().norm().item()
    assert error == pytest.approx(smallest_error(conv.weight.flatten(1), 6), rel=1e-4)
    x = torch.rand(2, 8, 9, 9)
    conv.weight.data = product.data
    torch.testing.assert_close(factorized(x), conv(x), atol=1e-5, rtol=1e-5)


def test_weights_of_low_rank_are_not_changed_at_all():
    linear = nn.Linear(32, 32)
    linear.weight.data = torch.randn(32, 4) @ torch.randn(4, 32)
    model, x = nn.Sequential(linear), torch.rand(5, 32)
    expected = model(x)
    apply_factorization(model, min_features=16, latent_features=4)
    torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=1e-4)


class TestFactorizeMatrix:
    @pytest.mark.parametrize("n_iters", [0, 1, 5])
    def test_errors_shrink_with_the_rank(self, n_iters):
        x, w = problem()
        errors = [factorize_matrix(x, x @ w, w, rank=k, n_iters=n_iters).nmse for k in range(1, 10)]
        assert errors[0] < 1
        assert all(later <= earlier + 1e-8 for earlier, later in itertools.pairwise(errors))

    @given(seed=st.integers(0, 50), rank=st.integers(1, 8))
    def test_errors_shrink_with_iterations(self, seed, rank):
        x, w = problem(seed=seed)
        y = (x @ w).relu()
        errors = [factorize_matrix(x, y, w, rank=rank, n_iters=n).nmse for n in range(4)]
        assert all(later <= earlier + 1e-8 for earlier, later in itertools.pairwise(errors))

    def test_the_error_is_that_of_the_matrices_returned(self):
        x, w = problem()
        bias = torch.randn(10)
        y = x @ w + bias + 0.1
        solution = factorize_matrix(x, y, w, bias=bias, rank=4)
        error = (x @ solution.Wa @ solution.Wb + solution.bias - y).double().square().mean() / y.double().var(
            correction=0
        )
        assert solution.nmse == pytest.approx(error.item(), rel=1e-4)
        assert solution.rank == 4

    def test_white_data_give_the_truncated_singular_value_decomposition(self):
        x = torch.linalg.qr(torch.randn(40, 12))[0] * 7  # all directions alike: only the weights decide
        w = problem()[1]
        solution = factorize_matrix(x, x @ w, w, rank=3, n_iters=4)
        assert (solution.Wa @ solution.Wb - w).norm().item() == pytest.approx(smallest_error(w, 3), rel=1e-3)

    def test_a_constant_difference_goes_into_the_bias(self):
        x, w = problem()
        x = x - x.mean(0)
        solution = factorize_matrix(x, x @ w + 3, w, bias=torch.zeros(10), rank=9)
        torch.testing.assert_close(solution.bias, torch.full((10,), 3.0))

    @pytest.mark.parametrize("rank", [10, 12, 50])
    def test_a_rank_that_is_no_constraint_gives_one_matrix(self, rank):
        x, w = problem()
        solution = factorize_matrix(x, x @ w, torch.zeros_like(w), rank=rank)
        torch.testing.assert_close(solution.Wa, w, atol=1e-4, rtol=1e-4)
        assert (solution.Wb, solution.rank) == (None, -1)

    def test_a_rank_that_is_no_lower_than_the_present_one_changes_nothing(self):
        x, w = problem()
        first, second = torch.randn(12, 3), torch.randn(3, 10)
        solution = factorize_matrix(x, x @ w, first, second, rank=3)
        assert torch.equal(solution.Wa, first)
        assert torch.equal(solution.Wb, second)
        assert solution.rank == -1

    def test_data_without_full_rank_can_be_used(self):
        x, w = problem(num=4)
        assert factorize_matrix(x, x @ w, w, rank=3).nmse < 1

    @pytest.mark.parametrize("settings", [{"rank": 0}, {"rank": 2, "n_iters": -1}])
    def test_no_rank_and_fewer_than_no_iterations_are_refused(self, settings):
        x, w = problem()
        with pytest.raises(ValueError, match="rank must be above 0"):
            factorize_matrix(x, x @ w, w, **settings)


class TestFactorizeConv2d:
    @pytest.mark.parametrize("padding", [0, 1, (0, 2), "same", "valid"])
    def test_enough_channels_reproduce_the_convolution(self, padding):
        x, weight, bias = torch.randn(3, 4, 6, 7), torch.randn(8, 4, 3, 3), torch.randn(8)
        weight[4:] = weight[:4]  # rank 4
        solution = factorize_conv2d(x, weight, biasA=bias, rank=4, padding=padding)
        actual = F.conv2d(F.conv2d(x, solution.Wa, padding=padding), solution.Wb, solution.bias)
        torch.testing.assert_close(actual, F.conv2d(x, weight, bias, padding=padding), atol=1e-4, rtol=1e-4)

    def test_two_convolutions_with_biases_become_two_smaller_ones(self):
        x, first, second = torch.randn(3, 4, 6, 6), torch.randn(6, 4, 3, 3), torch.randn(9, 6, 1, 1)
        first[3:] = first[:3]
        bias_a, bias_b = torch.randn(6), torch.randn(9)
        solution = factorize_conv2d(x, first, second, rank=3, biasA=bias_a, biasB=bias_b)
        expected = F.conv2d(F.conv2d(x, first, bias_a), second, bias_b)
        actual = F.conv2d(F.conv2d(x, solution.Wa), solution.Wb, solution.bias)
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("settings", [{"stride": 2}, {"dilation": (1, 2)}, {"groups": 2}])
    def test_what_cannot_be_fitted_is_refused(self, settings):
        with pytest.raises(NotImplementedError, match=f"{next(iter(settings))}="):
            factorize_conv2d(torch.rand(1, 4, 5, 5), torch.rand(8, 4, 3, 3), **settings)

    def test_a_second_bias_needs_a_second_convolution(self):
        with pytest.raises(RuntimeError, match="biasB"):
            factorize_conv2d(torch.rand(1, 4, 5, 5), torch.rand(8, 4, 3, 3), biasB=torch.rand(8))


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_ranks_can_be_lowered_with_the_least_change_on_data(kind):
    if kind == "linear":
        layer, x = FactorizedLinear(24, 20, latent_features=8), torch.randn(200, 24)
    else:
        layer, x = FactorizedConv2d(8, 16, 3, latent_channels=8, padding=1, stride=2), torch.randn(4, 8, 6, 6)
    expected = layer(x)
    latent = "latent_features" if kind == "linear" else "latent_channels"
    errors = []
    for rank in (8, 5, 2):
        layer.set_rank(x, rank)
        assert getattr(layer, latent) == rank
        assert layer.module0.weight.shape[0] == layer.module1.weight.shape[1] == rank
        first, second = layer.module0, layer.module1
        names = ("out_features", "in_features") if kind == "linear" else ("out_channels", "in_channels")
        assert (getattr(first, names[0]), getattr(second, names[1])) == (rank, rank)
        errors.append((layer(x) - expected).square().mean().item())
    assert errors[0] == 0
    assert errors[0] < errors[1] < errors[2] < expected.var().item()
    with pytest.raises(ValueError, match="rank=3 is out of range"):
        layer.set_rank(x, 3)


@pytest.mark.parametrize(("num_in", "num_out"), [(512, 512), (300, 700), (64, 1000)])
def test_the_largest_rank_is_the_last_with_less_work(num_in, num_out):
    most = FactorizedLinear.max_allowed_latent_features(num_in, num_out)
    assert most * (num_in + num_out) < num_in * num_out <= (most + 1) * (num_in + num_out)
    FactorizedLinear(num_in, num_out, latent_features=most)
    with pytest.raises(ValueError, match=f"a latent size of {most + 1} .*pass {most} or less"):
        FactorizedLinear(num_in, num_out, latent_features=most + 1)
    conv = FactorizedConv2d.max_allowed_latent_channels(num_in, num_out, 3)
    assert conv * (9 * num_in + num_out) < 9 * num_in * num_out <= (conv + 1) * (9 * num_in + num_out)


def test_only_layers_that_would_do_less_work_are_worth_it():
    assert factorizing_could_speedup(nn.Conv2d(64, 64, 3), 0.5)
    assert not factorizing_could_speedup(nn.Conv2d(64, 64, 3, groups=2), 0.25)
    assert not factorizing_could_speedup(nn.Linear(64, 64), 32)
    assert not factorizing_could_speedup(nn.ReLU(), 1)
    factorized = FactorizedLinear(64, 64, latent_features=8)
    assert factorizing_could_speedup(factorized, 7)
    assert not factorizing_could_speedup(factorized, 8)
    with pytest.raises(NotImplementedError, match="groups=2"):
        FactorizedConv2d(64, 64, 3, groups=2)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(16, 16, 3), nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(32, 40), nn.Linear(40, 2))


def test_large_layers_are_replaced_and_the_optimizer_follows_in_its_groups():
    model = network()
    named = list(model.named_parameters())
    groups = [[p for n, p in named if n.endswith(kind)] for kind in ("weight", "bias")]
    optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.1)
    settings = {"min_channels": 16, "latent_channels": 4, "min_features": 16, "latent_features": 0.25}
    apply_factorization(model, **settings, optimizers=optimizer)
    kinds = [type(layer).__name__ for layer in model]
    assert kinds == ["FactorizedConv2d", "FactorizedConv2d", "Flatten", "FactorizedLinear", "Linear"]
    for group, kind in zip(optimizer.param_groups, ("weight", "bias"), strict=True):
        assert {id(p) for p in group["params"]} == {id(p) for n, p in model.named_parameters() if n.endswith(kind)}
    once = str(model)
    apply_factorization(model, **settings)
    assert str(model) == once


@pytest.mark.parametrize(("convs", "linears"), [(True, False), (False, True)])
def test_each_kind_can_be_left_out(convs, linears):
    model = network()
    apply_factorization(model, convs, linears, min_channels=16, min_features=16)
    assert isinstance(model[0], FactorizedConv2d) == convs
    assert isinstance(model[3], FactorizedLinear) == linears


def test_shared_weights_and_the_output_of_attention_are_left_alone():
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(40, 32),
            "head": nn.Linear(32, 40),
            "attention": nn.MultiheadAttention(32, 2),
            "body": nn.Linear(32, 32),
        }
    )
    model["head"].weight = model["embedding"].weight
    apply_factorization(model, min_features=16)
    assert type(model["head"]) is nn.Linear
    assert model["head"].weight is model["embedding"].weight
    x = torch.rand(3, 1, 32)
    assert model["attention"](x, x, x)[0].shape == x.shape
    assert isinstance(model["body"], FactorizedLinear)


@pytest.mark.parametrize("layer", [lambda: nn.Linear(32, 32), lambda: nn.Conv2d(32, 32, 3)], ids=["linear", "conv"])
def test_a_layer_with_two_names_is_replaced_under_both(layer):
    """Such a layer stayed as large as it was, since its weight was taken to be shared with another one."""
    body = nn.Sequential(layer())
    model = nn.ModuleDict({"body": body, "alias": body[0], "outer": nn.Sequential(body)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply_factorization(model, min_features=16, min_channels=16, optimizers=optimizer)
    assert isinstance(body[0], (FactorizedLinear, FactorizedConv2d))
    assert model["alias"] is body[0]
    assert {id(parameter) for parameter in optimizer.param_groups[0]["params"]} == set(map(id, model.parameters()))


def test_a_transformer_layer_predicts_what_it_computes_in_training():
    # In evaluation it hands its weights to one kernel, instead of calling its layers.
    model = nn.TransformerEncoderLayer(32, 2, dim_feedforward=48, dropout=0.0, batch_first=True)
    apply_factorization(model, min_features=16, latent_features=4)
    assert isinstance(model.linear1, FactorizedLinear)
    x = torch.rand(3, 5, 32)
    trained = model(x).detach()
    with torch.no_grad():
        # The same products in another order, of values of about 1.
        torch.testing.assert_close(model.eval()(x), trained, rtol=0, atol=64 * torch.finfo(torch.float32).eps)


def test_dtype_and_meta_device_are_kept():
    model = network().bfloat16()
    apply_factorization(model, min_channels=16, min_features=16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with torch.device("meta"):
        model = network()
    apply_factorization(model, min_channels=16, min_features=16)
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_model_without_large_layers_is_logged(caplog):
    apply_factorization(network())
    assert "Factorize has no effect on this Sequential" in caplog.text


@pytest.mark.parametrize("argument", ["latent_channels", "latent_features"])
def test_nothing_in_between_is_refused(argument):
    with pytest.raises(ValueError, match=rf"{argument}=0 is not in \(0, inf"):
        Factorize(**{argument: 0})


def test_the_algorithm_logs_the_kinds_that_are_enabled():
    class Log:
        def __init__(self):
            self.parameters = {}

        def log_hyperparameters(self, parameters):
            self.parameters.update(parameters)

    state, log = State(network(), rank_zero_seed=0, max_duration="1ep"), Log()
    Factorize(factorize_linears=False, min_channels=16).apply(Event.INIT, state, log)
    assert log.parameters == {"factorize/num_conv2d_replacements": 2}
