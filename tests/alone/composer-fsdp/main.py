"""Shard a module with its optimizer, train a step, and look at whole weights again."""

import torch
from torch import nn

from composer_fsdp import FSDPConfig, parallelize_model, summon_full_params_fsdp2

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
model.fsdp_wrap_fn = lambda module: isinstance(module, nn.Linear)
optimizer = torch.optim.AdamW(model.parameters())
sharded = parallelize_model(model, FSDPConfig(min_params=None), optimizer, device="cpu")
nn.functional.cross_entropy(model(torch.randn(4, 4)), torch.tensor([0, 1, 0, 1])).backward()
optimizer.step()
with summon_full_params_fsdp2(model):
    assert model[0].weight.shape == (8, 4)
print(f"units: {[unit.name for unit in sharded.units]}")
torch.distributed.destroy_process_group()
