"""Train, evaluate, save, and resume with the Trainer."""

from tempfile import mkdtemp

import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.algorithms import EMA, LabelSmoothing
from composer.models import ComposerClassifier

torch.manual_seed(0)
points = torch.randn(512, 2)
inside = (points.norm(dim=1) < 1.2).long()
train = DataLoader(TensorDataset(points[:384], inside[:384]), batch_size=32, shuffle=True)
test = DataLoader(TensorDataset(points[384:], inside[384:]), batch_size=128)
folder = mkdtemp()


def make_trainer(max_duration):
    """Return a Trainer that goes on where the latest one stopped."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    model = ComposerClassifier(module, num_classes=2)
    return Trainer(
        model=model,
        train_dataloader=train,
        eval_dataloader=test,
        max_duration=max_duration,
        optimizers=torch.optim.Adam(model.parameters(), lr=0.02),
        algorithms=[LabelSmoothing(0.05), EMA(half_life="10ba")],
        run_name="points",
        save_folder=folder,
        autoresume=True,
        progress_bar=False,
        device="cpu",
        seed=7,
    )


with make_trainer("5ep") as trainer:
    trainer.fit()
with make_trainer("10ep") as trainer:
    assert trainer.state.timestamp.epoch == 5
    trainer.fit()
    accuracy = trainer.state.eval_metric_values["MulticlassAccuracy"].item()

assert accuracy > 0.9
print(f"accuracy {accuracy:.3f} after {trainer.state.timestamp.epoch}")
