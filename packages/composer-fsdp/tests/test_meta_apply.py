"""A function is applied to all tensors of a module, whether or not they have memory."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from composer_dist.testing import run_ranks
from composer_fsdp.meta_init import meta_safe_apply


def on_host(tensor):
    return torch.full_like(tensor, 0.5, device="cpu")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.down = nn.Linear(3, 5, bias=False)
        self.down.weight = self.up.weight

    def forward(self, inputs):
        return self.norm(self.up(inputs)) @ self.down.weight


def make(device="meta"):
    with torch.device(device):
        return Tied()


def on_meta(model):
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name for name, tensor in named if tensor.is_meta}


def test_everything_leaves_the_meta_device_and_what_is_tied_stays_tied():
    model = make()
    model.up.bias.requires_grad_(False)
    calls = []
    assert meta_safe_apply(model, lambda tensor: on_host(calls.append(tensor) or tensor), set(), "") is model
    assert on_meta(model) == set()
    assert model.up.weight is model.down.weight
    assert len(calls) == 7  # each tensor once
    assert [p.requires_grad for p in model.up.parameters()] == [True, False]
    assert model.up.weight.sum() == 7.5


@pytest.mark.parametrize(
    ("ignored", "prefix", "left"),
    [
        (
            ["norm"],
            "",
            {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"},
        ),
        (["norm.weight", "norm.running_var", "up.bias"], "", {"norm.weight", "norm.running_var", "up.bias"}),
        (["net.up.bias", "norm"], "net", {"up.bias"}),
        (["net"], "net", None),
    ],
)
def test_what_is_ignored_by_name_stays_as_it_is(ignored, prefix, left):
    model = make()
    before = on_meta(model)
    meta_safe_apply(model, on_host, set(ignored), prefix)
    assert on_meta(model) == (before if left is None else left)


def test_a_module_itself_may_be_ignored():
    model = make()
    meta_safe_apply(model, on_host, {model.norm}, "")
    assert on_meta(model) == {name for name in on_meta(make()) if name.startswith("norm")}


def test_parameters_that_have_memory_stay_the_objects_that_an_optimizer_knows():
    model = make("cpu")
    weight = model.up.weight
    weight.grad = torch.ones_like(weight)
    meta_safe_apply(model, lambda tensor: tensor.double() * 2 if tensor.is_floating_point() else tensor, set(), "")
    assert model.up.weight is weight
    assert model.down.weight is weight
    assert weight.dtype == weight.grad.dtype == model.norm.running_var.dtype == torch.float64
    assert weight.grad.unique() == 2


def shard_and_fill():
    model = make()
    fully_shard(model.norm)
    fully_shard(model)
    meta_safe_apply(model, on_host, set(), "")
    kinds = {type(parameter.data) for parameter in model.parameters()}
    model(torch.ones(4, 3)).sum().backward()
    return kinds, model.up.weight.full_tensor(), model.up.weight.grad.full_tensor().shape


def test_units_of_a_sharded_model_go_on_with_what_they_are_given(tmp_path):
    for kinds, weight, grad_shape in run_ranks(shard_and_fill, store=tmp_path / "store"):
        assert kinds == {DTensor}
        assert torch.equal(weight, torch.full((5, 3), 0.5))
        assert grad_shape == (5, 3)
