"""A training script for tests that end it with signals.

preempted_script.py FOLDER BATCHES

Each rank appends the number and the loss of every batch to FOLDER/losses-rank{rank}.txt, and takes its time,
unless there is a file FOLDER/fast.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, Trainer
from composer.models import ComposerModel
from composer.utils import dist

folder, num_batches = Path(sys.argv[1]), int(sys.argv[2])


class WriteLosses(Callback):
    def batch_end(self, state, logger):
        loss = state.total_loss_dict["loss/train/total"].item()
        with open(folder / f"losses-rank{dist.get_global_rank()}.txt", "a") as file:
            file.write(f"{int(state.timestamp.batch)} {loss.hex()}\n")
        if not (folder / "fast").exists():
            time.sleep(0.05)


torch.manual_seed(5)
network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2))
model = ComposerModel.from_module(network, nn.functional.cross_entropy)
points = torch.randn(64, 4)
dataset = TensorDataset(points, (points.sum(dim=1) > 0).long())
with Trainer(
    model=model,
    train_dataloader=DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset, shuffle=True)),
    max_duration=f"{num_batches}ba",
    optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
    callbacks=WriteLosses(),
    save_folder=str(folder / "checkpoints"),
    save_filename="ba{batch}.pt",
    save_interval="1000ba",
    autoresume=True,
    run_name="plum",
    seed=3,
    device="cpu",
    progress_bar=False,
    dist_timeout=30,
) as trainer:
    trainer.fit()
print("trained to the end")
