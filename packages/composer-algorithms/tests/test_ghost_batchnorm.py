"""Ghost batch normalization against means and variances of the parts, one after the other."""

import math

import pytest
import torch
from torch import nn

from composer_algorithms import GhostBatchNorm
from composer_algorithms.functional import apply_ghost_batchnorm
from composer_algorithms.ghost_batchnorm import GhostBatchNorm1d, GhostBatchNorm2d, GhostBatchNorm3d
from composer_events import Event, State

KINDS = [
    (nn.BatchNorm1d, GhostBatchNorm1d, ()),
    (nn.BatchNorm1d, GhostBatchNorm1d, (5,)),
    (nn.BatchNorm2d, GhostBatchNorm2d, (3, 2)),
    (nn.BatchNorm3d, GhostBatchNorm3d, (2, 3, 2)),
]


class OtherNorm(nn.BatchNorm1d):
    """A subclass that computes something of its own."""

    def forward(self, input):
        return super().forward(2 * input)


def reference(norm, x, size):
    """Normalize each part in double precision; return the outputs and the running averages that follow."""
    num_parts = math.ceil(len(x) / size)
    mean, var = norm.running_mean.double(), norm.running_var.double()
    outputs = []
    parts = x.double().chunk(num_parts)
    if num_parts > 1 and parts[-1].numel() == x.shape[1]:  # one value in a channel has no variance
        num_parts -= 1
        parts = x.double().tensor_split(num_parts)
    for i, part in enumerate(parts):
        values = part.transpose(0, 1).flatten(1)
        part_mean, part_var = values.mean(1), values.var(1, unbiased=False)
        shape = (1, -1, *[1] * (x.ndim - 2))
        normalized = (part - part_mean.view(shape)) / (part_var.view(shape) + norm.eps).sqrt()
        outputs.append(normalized * norm.weight.double().view(shape) + norm.bias.double().view(shape))
        count = int(norm.num_batches_tracked) + i + 1
        momentum = 1 / count if norm.momentum is None else norm.momentum / num_parts
        mean = (1 - momentum) * mean + momentum * part_mean
        var = (1 - momentum) * var + momentum * values.var(1, unbiased=True)
    return torch.cat(outputs), mean, var


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize(("batch_size", "size"), [(12, 4), (8, 8), (11, 4), (13, 5), (13, 4), (3, 2), (3, 8)])
@pytest.mark.parametrize(("base", "ghost", "rest"), KINDS)
def test_each_part_is_normalized_and_the_averages_follow_one_part_after_the_other(
    base, ghost, rest, batch_size, size, momentum
):
    """Seen before with 3 examples of 8, a short last batch, and 13 of 4, of which one is left: a ValueError."""
    torch.manual_seed(0)
    norm = base(4, momentum=momentum)
    nn.init.normal_(norm.weight)
    layer = ghost(norm, size)
    for _ in range(3):
        x = 3 * torch.randn(batch_size, 4, *rest) + 1
        expected, mean, var = reference(norm, x, size)
        torch.testing.assert_close(layer(x).double(), expected, atol=1e-5, rtol=1e-5)  # float32
        torch.testing.assert_close(norm.running_mean.double(), mean, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(norm.running_var.double(), var, atol=1e-5, rtol=1e-5)
    assert norm.momentum == momentum


def test_gradients_are_those_of_the_parts():
    x = torch.randn(8, 3, dtype=torch.double, requires_grad=True)
    layer = GhostBatchNorm1d(nn.BatchNorm1d(3, track_running_stats=False).double(), 4)
    assert torch.autograd.gradcheck(layer, (x,))


def test_evaluation_uses_the_averages_for_a_batch_of_any_size():
    norm = nn.BatchNorm1d(3)
    layer = GhostBatchNorm1d(norm, 8)
    layer(torch.randn(16, 3))
    layer.eval()
    x = torch.randn(3, 3)
    assert torch.equal(layer(x), norm(x))


def test_inputs_with_the_wrong_number_of_dims_are_refused():
    with pytest.raises(ValueError, match=r"has 3 dims, and GhostBatchNorm2d takes 4"):
        GhostBatchNorm2d(nn.BatchNorm2d(3), 2)(torch.randn(4, 3, 2))


def test_subclasses_are_called_for_each_part():
    layer, plain = GhostBatchNorm1d(OtherNorm(3), 4), GhostBatchNorm1d(nn.BatchNorm1d(3), 4)
    x = torch.randn(8, 3)
    assert torch.equal(layer(x), plain(2 * x))
    assert layer.batchnorm.momentum == 0.1
    assert torch.equal(layer.batchnorm.running_mean, plain.batchnorm.running_mean)


def model_with_norms():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Sequential(nn.BatchNorm2d(6), nn.BatchNorm3d(6)))


def test_norms_are_wrapped_and_stay_the_same_objects():
    model = model_with_norms()
    norms = [model[1], *model[2]]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [id(p) for p in optimizer.param_groups[0]["params"]]
    apply_ghost_batchnorm(model, 16, optimizers=optimizer)
    assert [one.batchnorm for one in (model[1], *model[2])] == norms
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == before
    assert model[1].ghost_batch_size == 16


def test_hooks_of_a_norm_fire_once_for_a_batch():
    model, calls = nn.Sequential(nn.BatchNorm1d(2)), []
    model[0].register_forward_hook(lambda module, args, output: calls.append(len(output)))
    apply_ghost_batchnorm(model, 2)
    model(torch.randn(8, 2))
    assert calls == [8]


def test_twice_is_once():
    model = model_with_norms()
    apply_ghost_batchnorm(model)
    once = str(model)
    apply_ghost_batchnorm(model)
    assert str(model) == once


def test_a_model_without_norms_is_logged(caplog):
    apply_ghost_batchnorm(nn.Linear(1, 1))
    assert "GhostBatchNorm has no effect on this Linear" in caplog.text


@pytest.mark.parametrize("size", [0, -4])
def test_ghost_batches_of_no_examples_are_refused(size):
    with pytest.raises(ValueError, match=rf"ghost_batch_size={size} is not in \[1, inf"):
        GhostBatchNorm(size)


def test_the_algorithm_logs_how_many_norms_there_are():
    class Log:
        def log_hyperparameters(self, parameters):
            self.parameters = parameters

    state, log = State(model_with_norms(), rank_zero_seed=0, max_duration="1ep"), Log()
    GhostBatchNorm(16).apply(Event.INIT, state, log)
    assert log.parameters == {"GhostBatchNorm/num_new_modules": 3}
    GhostBatchNorm(16).apply(Event.INIT, state)
