"""The ranks know alike of gradients that are not finite, by the reductions that average them."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composer_dist import dist, get_device
from composer_dist.testing import run_ranks
from composer_fsdp import FSDP, FSDPConfig, ParallelismConfig, make_plan

CPU = get_device("cpu")


class Row(nn.Module):
    """Has a small weight beside a large one, so that one rank has no part of it."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, width))
        self.linear = nn.Linear(width, width)

    def forward(self, inputs):
        return self.linear(inputs * self.scale)


class Net(nn.Sequential):
    def __init__(self, width=5):
        super().__init__(Row(width), Row(width), nn.Linear(width, 3))

    def fsdp_wrap_fn(self, module):
        return isinstance(module, Row)


def shard(**settings):
    torch.manual_seed(0)
    model = nn.Module()
    model.net = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = ParallelismConfig(fsdp=FSDPConfig(**settings))
    strategy = FSDP(CPU, make_plan(config, precision="amp_bf16", world_size=dist.get_world_size()))
    strategy.prepare(model, [optimizer])
    return strategy, model, optimizer


class Ruin(torch.autograd.Function):
    """Gives what it is given, and lets one element of the gradient be something else."""

    @staticmethod
    def forward(ctx, inputs, index, value):
        ctx.index, ctx.value = index, value
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient.view(-1)[ctx.index] = ctx.value
        return gradient, None, None


def find(strategy, model, optimizer, module, name, index, value, bad_rank):
    """Return whether anything is found in a good step, in one with a bad element on one rank, and in the next."""
    watch = strategy.watch_reductions()
    is_bad = dist.get_global_rank() == bad_rank
    owner = model.net.get_submodule(module)

    def ruin(submodule, _):
        whole = getattr(submodule, name)
        vars(submodule)["_parameters"][name] = Ruin.apply(whole, index, value)  # gathered anew in the next pass

    found = []
    for ruins in (False, True, False):
        strategy.zero_grad(optimizer)
        handle = owner.register_forward_pre_hook(ruin) if ruins and is_bad else None
        with strategy.microbatch(is_last=True):
            strategy.backward(model.net(torch.ones(2, 5)).square().mean())
        if handle is not None:
            handle.remove()
        found.append(math.isnan(watch.found.item()))
    return found


PLACES = [  # of an element that the first rank gets, and of one that the second gets
    ("0", "scale", 1),
    ("0.linear", "weight", 0),
    ("0.linear", "weight", 24),
    ("1.linear", "bias", 4),
    ("2", "weight", 0),
    ("2", "weight", 14),
]
VALUES = [math.nan, math.inf, -math.inf, 1e30]


def find_all(settings):
    strategy, model, optimizer = shard(**settings)
    return [
        find(strategy, model, optimizer, *place, VALUES[(number + bad_rank) % len(VALUES)], bad_rank)
        for number, place in enumerate(PLACES)
        for bad_rank in (0, 1)
    ]


@pytest.mark.parametrize("settings", [{"mixed_precision": "FULL"}, {"mixed_precision": "PURE"}], ids=str)
def test_what_is_not_finite_on_one_rank_is_found_by_all_until_gradients_are_dropped(settings, tmp_path):
    first, second = run_ranks(find_all, settings, store=tmp_path / "store")
    assert first == second == [[False, True, False]] * (2 * len(PLACES))


def look_at_each():
    said = {}
    for name, settings in {
        "replicated": {"sharding_strategy": "NO_SHARD"},
        "own": {"process_group": "self"},
    }.items():
        strategy, *_ = shard(**settings)
        said[name] = strategy.watch_reductions()
    strategy, model, _ = shard(mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp16"})
    watch = strategy.watch_reductions()
    strategy.backward(model.net(torch.ones(2, 5)).sum())
    said["float16"] = watch.speaks_of_all
    return said


def test_reductions_that_cannot_tell_all_ranks_do_not_claim_to(tmp_path):
    expected = {"replicated": None, "own": None, "float16": False}
    assert run_ranks(look_at_each, store=tmp_path / "store") == [expected] * 2


def look_at_what_no_plan_has_sharded():
    mesh = init_device_mesh("cpu", (2,))
    plan = make_plan(ParallelismConfig(fsdp=FSDPConfig(auto_wrap=False)), precision="fp32", world_size=2)
    said = {}
    for name, is_split in {"split": True, "split and sharded": True, "sharded": False}.items():
        model = nn.Module()
        model.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        if is_split:
            parallelize_module(model.net, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        if "sharded" in name:
            fully_shard(model.net[2], mesh=mesh)
        if name == "sharded":
            fully_shard(model.net, mesh=mesh)
        strategy = FSDP(CPU, plan)
        strategy.prepare(model, [])
        said[name] = strategy.watch_reductions() is not None
    return said


def test_tensors_that_somebody_has_split_and_no_unit_reduces_are_not_spoken_of(tmp_path):
    expected = {"split": False, "split and sharded": False, "sharded": True}
    assert run_ranks(look_at_what_no_plan_has_sharded, store=tmp_path / "store") == [expected] * 2


class Counting:
    """A reduction of somebody's own."""

    def __init__(self):
        self.num_calls = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.num_calls += 1
        torch.distributed.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op)


def reduce_by_own():
    strategy, model, _ = shard(mixed_precision="FULL")
    plain, *_ = shard(mixed_precision="FULL")
    own = Counting()
    model.net[0].set_custom_reduce_scatter(own)
    for _ in range(2):  # as two calls of fit do
        watch = strategy.watch_reductions()
    for each in (strategy, plain):
        each.backward(each.sharded.model.net(torch.ones(2, 5)).sum())
    gradients = [[p.grad.to_local() for p in each.sharded.model.parameters()] for each in (strategy, plain)]
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    same = all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    return own.num_calls, same, watch.found.item()


def test_a_reduction_of_somebodys_own_goes_on_to_reduce_and_gradients_stay_the_same(tmp_path):
    assert run_ranks(reduce_by_own, store=tmp_path / "store") == [(1, True, 0.0)] * 2
