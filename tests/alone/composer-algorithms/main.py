"""MixUp and an average of the weights in a plain PyTorch loop."""

import copy

import torch
import torch.nn.functional as F

from composer_algorithms import functional as cf

torch.manual_seed(0)
inputs = torch.randn(512, 2)
targets = (inputs.norm(dim=1) < 1.2).long()
model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
average = copy.deepcopy(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for _ in range(10):
    for x, y in zip(inputs.split(32), targets.split(32), strict=True):
        mixed, permuted, mixing = cf.mixup_batch(x, y, alpha=0.2)
        logits = model(mixed)
        loss = (1 - mixing) * F.cross_entropy(logits, y) + mixing * F.cross_entropy(logits, permuted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        cf.compute_ema(model, average, smoothing=0.95)

accuracy = (average(inputs).argmax(1) == targets).float().mean().item()
assert accuracy > 0.9
print(f"accuracy of the average {accuracy:.3f}")
