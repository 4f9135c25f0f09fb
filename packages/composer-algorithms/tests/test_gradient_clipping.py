"""Gradient clipping against its definitions, on whole and on sharded gradients, and on its events."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from composer_algorithms import AGC, GradientClipping
from composer_algorithms.functional import apply_agc, apply_gradient_clipping
from composer_dist.testing import run_ranks
from composer_events import Event

TYPES = ["norm", "value", "adaptive"]
SHAPES = [(4, 3, 3, 3), (5, 4), (7,), ()]


def parameters_with_gradients(seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    parameters = []
    for shape in SHAPES:
        parameter = torch.randn(shape, generator=generator).requires_grad_()
        parameter.grad = scale * torch.randn(shape, generator=generator)
        parameters.append(parameter)
    return [*parameters, torch.ones(3, requires_grad=True)]  # the last one has no gradient


def gradients_of(parameters):
    return [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]


def clipped_by_definition(parameters, clipping_type, threshold):
    gradients = [gradient.double() for gradient in gradients_of(parameters)]
    if clipping_type == "norm":
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        return [gradient * min(1.0, threshold / norm.item()) for gradient in gradients]
    if clipping_type == "value":
        return [gradient.clamp(-threshold, threshold) for gradient in gradients]
    result = []
    for weight, gradient in zip(parameters, gradients, strict=False):
        rows = gradient.reshape(len(gradient), -1) if gradient.ndim > 1 else gradient.reshape(1, -1)
        weights = weight.detach().double().reshape(rows.shape)
        result.append(
            torch.stack(
                [g * min(1.0, threshold * (w.norm() / g.norm()).item()) for g, w in zip(rows, weights, strict=True)]
            ).reshape(gradient.shape)
        )
    return result


@given(
    clipping_type=st.sampled_from(TYPES),
    threshold=st.floats(0.01, 20),
    scale=st.sampled_from([0.01, 1.0, 50.0]),
    seed=st.integers(0, 99),
)
def test_each_kind_does_what_its_definition_says(clipping_type, threshold, scale, seed):
    parameters = parameters_with_gradients(seed, scale)
    expected = clipped_by_definition(parameters, clipping_type, threshold)
    apply_gradient_clipping(parameters, clipping_type, threshold)
    # torch divides by the norm plus 1e-6.
    torch.testing.assert_close([g.double() for g in gradients_of(parameters)], expected, rtol=1e-4, atol=1e-6)
    assert parameters[-1].grad is None


@pytest.mark.parametrize("clipping_type", TYPES)
def test_gradients_within_the_bound_keep_every_bit(clipping_type):
    parameters = parameters_with_gradients(scale=1e-3)
    before = gradients_of(parameters)
    apply_gradient_clipping(parameters, clipping_type, 10.0)
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(parameters), before, strict=True))


@pytest.mark.parametrize("shape", [(4500, 1000), (2, 2_200_000), (4_300_000, 1), (5, 900_000, 1, 1)])
def test_units_of_a_tensor_that_is_larger_than_a_cache_are_clipped_like_others(shape):
    weight = torch.randn(shape).requires_grad_()
    weight.grad = gradient = torch.rand(shape[0], *[1] * (len(shape) - 1)) * torch.randn(shape)
    dims = tuple(range(1, len(shape)))
    norms = [torch.linalg.vector_norm(one.detach().double(), dim=dims, keepdim=True) for one in (weight, gradient)]
    expected = gradient.double() * (0.4 * norms[0] / norms[1]).clamp(max=1)
    apply_gradient_clipping([weight], "adaptive", 0.4)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-7)  # float32
    assert not torch.equal(gradient[0], gradient[-1])


def test_weights_of_zero_do_not_move_unless_eps_gives_them_a_norm():
    weight = torch.zeros(2, 2, requires_grad=True)
    weight.grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    apply_gradient_clipping([weight], "adaptive", 0.1, eps=1e-3)
    torch.testing.assert_close(weight.grad, torch.tensor([[6e-5, 8e-5], [0.0, 0.0]]))
    apply_gradient_clipping([weight], "adaptive", 0.1)
    assert not weight.grad.any()


@pytest.mark.parametrize("clipping_type", TYPES)
def test_a_model_and_its_parameters_are_clipped_alike(clipping_type, make_model):
    model = make_model(norm=False)
    model.loss(model((torch.ones(2, 4),)), (None, torch.tensor([0, 1]))).mul(100).backward()
    other = copy.deepcopy(model)
    for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
        twin.grad = parameter.grad.clone()
    apply_gradient_clipping(model, clipping_type, 0.1, fsdp_enabled=False)
    apply_gradient_clipping(other.parameters(), clipping_type, 0.1)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert sum(p.grad.square().sum() for p in model.parameters()).sqrt() < 10


def test_the_norm_is_clipped_by_torchs_own_function(monkeypatch):
    class Model:
        def parameters(self):
            return "the parameters"

    seen = []
    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", lambda parameters, **rest: seen.append((parameters, rest)))
    apply_gradient_clipping(Model(), "norm", 0.5, False)
    assert seen == [("the parameters", {"max_norm": 0.5})]


@pytest.mark.parametrize("clipping_type", TYPES)
def test_without_any_gradient_there_is_nothing_to_clip(clipping_type):
    model = nn.Linear(2, 2)
    for parameters in (model, model.parameters(), list(model.parameters()), []):
        apply_gradient_clipping(parameters, clipping_type, 0.1)
    assert model.weight.grad is None


@pytest.mark.parametrize("make", [lambda *a: apply_gradient_clipping([], *a), GradientClipping], ids=["cf", "class"])
@pytest.mark.parametrize(
    ("clipping_type", "threshold", "message"),
    [
        ("length", 1.0, "clipping_type='length' is unknown: choose one of 'norm', 'value', 'adaptive'"),
        ("norm", -1.0, r"clipping_threshold=-1\.0 is not in \[0, inf"),
        ("value", float("nan"), r"clipping_threshold=nan is not in \[0, inf"),
    ],
)
def test_an_unknown_kind_and_a_bound_that_is_none_are_refused(make, clipping_type, threshold, message):
    with pytest.raises(ValueError, match=message):
        make(clipping_type, threshold)


def test_adaptive_clipping_is_refused_under_fsdp1_which_has_no_units():
    with pytest.raises(ValueError, match="'adaptive' needs whole units"):
        apply_gradient_clipping(nn.Linear(1, 1), "adaptive", 0.1, fsdp_enabled=True)


def test_the_older_names_work_and_say_what_to_write_instead():
    parameters, others = parameters_with_gradients(), parameters_with_gradients()
    with pytest.warns(DeprecationWarning, match="'adaptive', 0.02") as caught:
        apply_agc(parameters, clipping_threshold=0.02)
    apply_gradient_clipping(others, "adaptive", 0.02)
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(parameters), gradients_of(others), strict=True))
    with pytest.warns(DeprecationWarning, match="GradientClipping"):
        algorithm = AGC(0.02)
    assert repr(algorithm) == "GradientClipping(clipping_type='adaptive', clipping_threshold=0.02)"
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize("clipping_type", TYPES)
def test_training_does_not_depend_on_how_a_batch_is_cut(clipping_type, make_loop, make_model):
    weights = [
        make_loop([GradientClipping(clipping_type, 0.05)], model=make_model(norm=False), microbatch_size=size).fit()
        for size in (8, 4, 2)
    ]
    for loop in weights[1:]:
        torch.testing.assert_close(loop.model.state_dict(), weights[0].model.state_dict(), rtol=1e-5, atol=1e-6)


def test_clipping_changes_the_training(make_loop, make_model):
    free, clipped = (
        make_loop(algorithms, model=make_model(norm=False)).fit()
        for algorithms in ([], [GradientClipping("norm", 1e-3)])
    )
    assert not torch.equal(free.model.first.weight, clipped.model.first.weight)


def test_a_loop_may_clip_the_norm_in_its_own_way(state):
    seen = []
    algorithm = GradientClipping("norm", 0.5)
    algorithm.clip_grad_norm = lambda parameters, max_norm: seen.append((list(parameters), max_norm))
    for event in (Event.INIT, Event.AFTER_TRAIN_BATCH):
        assert algorithm.match(event, state)
        algorithm.apply(event, state, None)
    assert len(seen) == 1
    assert seen[0][1] == 0.5
    assert [id(p) for p in seen[0][0]] == [id(p) for p in state.model.parameters()]


def test_under_deepspeed_it_leaves_the_gradients_to_the_engine(state):
    state.deepspeed_config = {}
    state.model.first.weight.grad = torch.full_like(state.model.first.weight, 9.0)
    GradientClipping("norm", 0.1).apply(Event.AFTER_TRAIN_BATCH, state, None)
    assert (state.model.first.weight.grad == 9).all()
    with pytest.raises(NotImplementedError, match="'norm' only"):
        GradientClipping("value", 0.1).apply(Event.INIT, state, None)
    with pytest.raises(ValueError, match="0 for no clipping"):
        GradientClipping("norm", 0.0).apply(Event.INIT, state, None)


def clip_sharded(clipping_type, threshold):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 2))
    sharded = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (2,))
    for layer in (sharded[0], sharded[2]):  # the last one stays whole on every rank
        fully_shard(layer, mesh=mesh)
    x = torch.ones(2, 6)
    for model in (whole, sharded):
        model(x).square().sum().mul(100).backward()
        apply_gradient_clipping(model, clipping_type, threshold)
    kinds = {isinstance(parameter, DTensor) for parameter in sharded.parameters()}
    gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in sharded.parameters()]
    return kinds, [p.grad for p in whole.parameters()], gradients


@pytest.mark.parametrize("clipping_type", TYPES)
def test_sharded_and_whole_gradients_together_are_clipped_like_whole_ones(clipping_type, tmp_path):
    for kinds, expected, found in run_ranks(clip_sharded, clipping_type, 0.05, store=tmp_path / "store"):
        assert kinds == {True, False}
        torch.testing.assert_close(found, expected)
