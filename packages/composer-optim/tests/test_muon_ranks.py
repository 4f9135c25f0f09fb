"""Muon on sharded and replicated parameters, in several processes."""

import itertools

import pytest
import torch
import torch.distributed as tdist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composer_dist.agreement import RankDisagreementError
from composer_dist.testing import run_ranks
from composer_optim import Muon

STEPS = 4
LR = 0.02
# Ranks round products and sums differently. A step moves the weights of a matrix by about 0.2 * LR, which rounding of
# float32 changes by less than 1e-4 of it, through five Newton-Schulz steps that amplify by at most 3.4445 each.
TOLERANCE = STEPS * 0.2 * LR * 3.4445**5 * torch.finfo(torch.float32).eps

OPTIONS = {
    "plain": {},
    "normuon": {"normuon_beta2": 0.95, "cautious": True, "cautious_updates": True, "ns_coefficients": "polar_express"},
}


class Net(nn.Module):
    """Matrices of equal, tall and wide shapes, a filter, and of lengths that ranks share unevenly."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(7, 5)
        self.up = nn.Linear(5, 14)
        self.mid = nn.ModuleList(nn.Linear(14, 14, bias=False) for _ in range(3))
        self.down = nn.Linear(14, 2)
        self.conv = nn.Conv1d(2, 3, 3, padding=1)
        self.head = nn.Linear(3, 7)

    def forward(self, tokens):
        x = torch.relu(self.up(self.embed(tokens)))
        for layer in self.mid:
            x = x + torch.tanh(layer(x))
        return self.head(self.conv(self.down(x).mT).mT)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model, optimizer, missing=()):
    """Step with the same gradients on every rank, independent of how the model is sharded."""
    generator = torch.Generator().manual_seed(3)
    for step in range(STEPS):
        for name, param in model.named_parameters():
            gradient = torch.randn(param.shape, generator=generator)
            param.grad = None if (step, name) in missing else _placed_like(gradient, param)
        optimizer.step()
    return {name: whole(param.detach()).clone() for name, param in model.named_parameters()}


def _placed_like(gradient, param):
    if not isinstance(param, DTensor):
        return gradient
    # The parts of a strided shard are those of the parameter, which `distribute_tensor` does not make.
    index = torch.arange(gradient.numel(), dtype=torch.float64).view(gradient.shape)
    return DTensor.from_local(
        gradient.flatten()[_own_part(index, param).long()].contiguous(),
        param.device_mesh,
        param.placements,
        shape=param.shape,
        stride=param.stride(),
    )


def _own_part(index, param):
    mesh = param.device_mesh
    splits = [(axis, each) for axis, each in enumerate(param.placements) if hasattr(each, "dim")]
    for axis, placement in sorted(splits, key=lambda split: hasattr(split[1], "split_factor")):
        chunks = index.chunk(mesh.size(axis), placement.dim)
        empty = index.narrow(placement.dim, 0, 0)
        rank = mesh.get_local_rank(axis)
        index = chunks[rank] if rank < len(chunks) else empty
    assert index.shape == param.to_local().shape
    return index


def shard(model, layout):
    world_size = tdist.get_world_size()
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    elif layout == "tp" or layout == "fsdp+tp":
        degree = world_size if layout == "tp" else 2
        mesh = init_device_mesh("cpu", (world_size // degree, degree), mesh_dim_names=("shard", "tensor"))
        plan = {"up": ColwiseParallel(), "mid.0": ColwiseParallel(), "mid.1": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        mesh = mesh["shard"]
    else:
        mesh = init_device_mesh("cpu", (world_size,))
    if layout not in ("tp", "ddp"):
        for layer in model.mid:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)


def five_steps(is_sharded):
    torch.manual_seed(0)
    layer = nn.Linear(6, 8, bias=False)
    if is_sharded:
        fully_shard(layer, mesh=init_device_mesh("cpu", (tdist.get_world_size(),)))
    optimizer = Muon([{"params": [layer.weight], "role": "muon"}], lr=LR, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        layer.weight.grad = _placed_like(torch.randn(8, 6, generator=generator), layer.weight)
        optimizer.step()
    return whole(layer.weight.detach())


def differ():
    return (five_steps(True) - five_steps(False)).abs().max().item()


def test_sharding_rounds_nothing_in_bfloat16(tmp_path):
    # Those of torch.optim.Muon differ by 2e-3 after these steps, since it multiplies shards and rounds partial sums.
    assert run_ranks(differ, store=tmp_path / "store", world_size=3) == [0, 0, 0]


def step_without_a_gradient(layouts):
    """Return the errors of steps in which only rank 1 lacks the gradient of one matrix."""
    errors = []
    for layout in layouts:
        model = Net()
        shard(model, layout)
        optimizer = Muon(model, lr=LR, divide=layout == "ddp")
        train(model, optimizer)
        if tdist.get_rank() == 1:
            model.mid[1].weight.grad = None
        with pytest.raises(RankDisagreementError) as caught:
            optimizer.step()
        errors.append(str(caught.value))
    return errors


def test_ranks_with_gradients_of_different_matrices_raise_the_same_error(tmp_path):
    for errors in run_ranks(step_without_a_gradient, ["ddp", "fsdp"], store=tmp_path / "store"):
        for error in errors:
            assert "gradient of mid.1.weight: 'present' on rank 0, 'missing' on rank 1" in error


def compare(layouts):
    """Return the largest difference from a single process for each layout and set of options."""
    results = {}
    for layout, name in itertools.product(layouts, OPTIONS):
        reference = Net()
        # In one step no rank has a gradient of one matrix, which therefore stays.
        missing = {(1, "mid.1.weight")}
        expected = train(reference, Muon(reference, lr=LR, **OPTIONS[name]), missing)
        model = Net()
        shard(model, layout)
        optimizer = Muon(model, lr=LR, divide=layout == "ddp", **OPTIONS[name])
        got = train(model, optimizer, missing)
        results[layout, name] = max((got[key] - expected[key]).abs().max().item() for key in expected)
        moved = (expected["up.weight"] - Net().up.weight).abs().mean()
        assert moved > LR / 10
    return results


@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [(1, ["fsdp"]), (2, ["ddp", "fsdp", "tp"]), (3, ["ddp", "fsdp"]), (4, ["fsdp", "hsdp", "fsdp+tp"])],
)
def test_ranks_that_share_matrices_take_the_step_of_one_process(world_size, layouts, tmp_path):
    for errors in run_ranks(compare, layouts, store=tmp_path / "store", world_size=world_size):
        assert max(errors.values()) < TOLERANCE, errors
