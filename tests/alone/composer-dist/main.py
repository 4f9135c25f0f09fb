"""Train in one process, and in two that the launcher starts, each with half of every batch, to the same weights."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

SCRIPT = """
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from composer_dist import DDP, SingleDevice, dist, get_device

device = get_device("cpu")
dist.initialize_dist(device)
strategy = DDP(device) if dist.get_world_size() > 1 else SingleDevice(device)

torch.manual_seed(0)
inputs = torch.randn(64, 4)
dataset = TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]]))
loader = DataLoader(dataset, batch_size=16 // dist.get_world_size(), sampler=dist.get_sampler(dataset))
model = torch.nn.Linear(4, 1)
model, (optimizer,) = strategy.prepare(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
for _ in range(10):
    for batch in loader:
        strategy.zero_grad(optimizer)
        x, y = strategy.prepare_batch(batch)
        with strategy.microbatch(is_last=True):
            strategy.backward(torch.nn.functional.mse_loss(model(x), y))
        strategy.step(optimizer)

if dist.get_global_rank() == 0:
    torch.save(strategy.model_state_dict(model), sys.argv[1])
"""

with TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "train.py").write_text(SCRIPT)
    launcher = [f"{sys.prefix}/bin/composer", "-n", "2"]
    for command, weights in ([sys.executable], "one.pt"), (launcher, "two.pt"):
        subprocess.run([*command, "train.py", weights], cwd=folder, check=True, timeout=300)
    one, two = torch.load(folder / "one.pt"), torch.load(folder / "two.pt")

torch.testing.assert_close(one, two)
torch.testing.assert_close(one["weight"], torch.tensor([[1.0, -2.0, 3.0, 0.5]]), atol=0.01, rtol=0)
print(f"weights {[round(weight, 3) for weight in two['weight'][0].tolist()]} in one process and in two")
