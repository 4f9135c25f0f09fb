"""Losses that are scaled for float16, on a model of which some weights are sharded and some are not."""

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from composer.trainer._scaler import ShardedGradScaler
from composer_dist import get_global_rank
from composer_dist.testing import run_ranks
from composer_fsdp import FSDPConfig, parallelize_model

SCALE = 8.0


def partly_sharded():
    """A model whose first layer is sharded over two ranks; its second one is whole on each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    parallelize_model(model[0], FSDPConfig(min_params=None), optimizer, device="cpu")
    optimizer.add_param_group({"params": model[1].parameters()})
    return model, optimizer


def step(bad_rank, bad_layer):
    model, optimizer = partly_sharded()
    scaler = ShardedGradScaler("cpu", init_scale=SCALE)
    before = [_part(weight).detach().clone() for weight in model.parameters()]
    scaler.scale(model(torch.ones(3, 4)).sum()).backward()
    if get_global_rank() == bad_rank:
        _part(model[bad_layer].weight.grad).view(-1)[0] = torch.inf
    scaler.unscale_(optimizer)
    gradients = [_part(weight.grad).clone() for weight in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    moved = [not torch.equal(_part(weight), old) for weight, old in zip(model.parameters(), before, strict=True)]
    return any(moved), scaler.get_scale(), model[1].bias.grad.item(), len(gradients)


def _part(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def test_gradients_of_sharded_and_of_whole_weights_are_unscaled_together(tmp_path):
    results = run_ranks(step, None, 0, store=tmp_path / "store")
    # The loss adds up three outputs, so the bias of the last layer has the gradient 3 on either rank.
    assert results == [(True, SCALE, 3.0, 4)] * 2


def test_no_rank_steps_where_one_has_an_infinite_part(tmp_path):
    for layer in (0, 1):
        results = run_ranks(step, 1, layer, store=tmp_path / f"store{layer}")
        assert [(moved, scale) for moved, scale, _, _ in results] == [(False, SCALE / 2)] * 2


def test_without_sharded_weights_it_scales_as_torch_does():
    scalers = ShardedGradScaler("cpu", init_scale=SCALE), GradScaler("cpu", init_scale=SCALE)
    weights = []
    for scaler in scalers:
        weight = nn.Parameter(torch.tensor([1.0, -2.0]))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        scaler.scale((weight**2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        weights.append(weight.detach())
    assert torch.equal(*weights)
