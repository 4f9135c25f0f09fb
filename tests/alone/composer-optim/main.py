"""Give a loop a schedule with warmup whose lengths are parts of the training."""

import torch

from composer_optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW, lambda_lr

torch.manual_seed(0)
inputs = torch.randn(64, 4)
targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
model = torch.nn.Linear(4, 1)
optimizer = DecoupledAdamW(model.parameters(), lr=0.3, weight_decay=1e-5)
scheduler = CosineAnnealingWithWarmupScheduler(t_warmup="0.1dur", alpha_f=0.02)
schedule = lambda_lr(optimizer, scheduler, max_duration="10ep", batches_per_epoch=8)
rates = []
for _ in range(10):
    for x, y in zip(inputs.split(8), targets.split(8), strict=True):
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

assert rates.index(max(rates)) == 8
assert loss < 0.01
print(f"learning rate up to {max(rates):.2f}, loss {loss.item():.5f}")
