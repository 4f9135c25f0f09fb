"""Fit a network whose weights and optimizer are spread over two processes, and put the whole weights together again."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

SCRIPT = """
import torch
from torch import nn

from composer_dist import dist
from composer_fsdp import FSDPConfig, parallelize_model, summon_full_params_fsdp2

dist.initialize_dist("cpu")
torch.manual_seed(0)
points = torch.randn(256, 2)
inside = (points.norm(dim=1) < 1.2).long()
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
model.fsdp_wrap_fn = lambda module: isinstance(module, nn.Linear)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
parallelize_model(model, FSDPConfig(min_params=None), optimizer, device="cpu")

rank, world_size = dist.get_global_rank(), dist.get_world_size()
for _ in range(60):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(points[rank::world_size]), inside[rank::world_size]).backward()
    optimizer.step()

held = sum(parameter.to_local().numel() for parameter in model.parameters())
moments = sum(state["exp_avg"].to_local().numel() for state in optimizer.state.values())
with summon_full_params_fsdp2(model):
    whole = sum(parameter.numel() for parameter in model.parameters())
    if rank == 0:
        torch.save({name: weight.clone() for name, weight in model.state_dict().items()}, "whole.pt")
assert (held, moments) == (whole // 2, whole // 2), (held, moments, whole)
print(f"rank {rank} held {held} of {whole} weights")
"""

with TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "train.py").write_text(SCRIPT)
    launch = [f"{sys.prefix}/bin/composer", "-n", "2", "--tee", "train.py"]
    subprocess.run(launch, cwd=folder, check=True, timeout=300)
    weights = torch.load(folder / "whole.pt")

network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
network.load_state_dict(weights)
fresh = torch.randn(1000, 2, generator=torch.Generator().manual_seed(1))
accuracy = (network(fresh).argmax(1) == (fresh.norm(dim=1) < 1.2)).float().mean().item()
assert accuracy > 0.9
print(f"accuracy {accuracy:.3f} in a process of its own")
