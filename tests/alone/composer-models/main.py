"""Train a classifier with its own loss and metrics, in a plain loop."""

import torch

from composer_models import ComposerClassifier, model_eval_mode

torch.manual_seed(0)
model = ComposerClassifier(
    torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)), num_classes=2
)
inputs = torch.randn(256, 2)
batch = inputs, (inputs[:, 0] > inputs[:, 1]).long()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
for _ in range(30):
    optimizer.zero_grad()
    model.loss(model(batch), batch).backward()
    optimizer.step()

metrics = model.get_metrics(is_train=False)
with torch.no_grad(), model_eval_mode(model):
    outputs = model.eval_forward(batch)
    for metric in metrics.values():
        model.update_metric(batch, outputs, metric)
accuracy = metrics["MulticlassAccuracy"].compute().item()

assert accuracy > 0.95
print(f"accuracy {accuracy:.3f}")
