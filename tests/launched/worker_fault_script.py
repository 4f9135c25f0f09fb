"""A training script in which a DataLoader's worker of rank 1 raises, is killed, or hangs.

worker_fault_script.py FAULT FILE

The time of the fault is written to the file, after one beside it that says that rank 1 waits for the batch.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from composer import Callback, Trainer
from composer.models import ComposerModel
from composer.utils import dist

fault = sys.argv[1]
is_faulty = dist.get_global_rank() == 1
FAULTY_SAMPLE = 9  # of the third batch
waits = Path(sys.argv[2] + "_waits")


class Waits(Callback):
    """Tell the worker that the batches before the faulty one are trained on."""

    def before_dataloader(self, state, logger):
        if is_faulty and state.timestamp.num_batches == FAULTY_SAMPLE // 4:
            waits.touch()


class Points(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if is_faulty and index == FAULTY_SAMPLE:
            while not waits.exists():
                time.sleep(0.01)
            time.sleep(1)  # until the event has ended, and the batch is waited for
            Path(sys.argv[2]).write_text(str(time.time()))
            if fault == "raises":
                raise ArithmeticError("no point today")
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hangs":
                time.sleep(600)
        return torch.ones(2), torch.tensor(0)


dataset = Points()
# Both ranks read all of it, so that the fault has one place.
sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=False)
model = ComposerModel.from_module(nn.Linear(2, 2), nn.functional.cross_entropy)
with Trainer(
    model=model,
    train_dataloader=DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=1, timeout=6),
    max_duration="10ba",
    callbacks=Waits(),
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
    device="cpu",
    progress_bar=False,
    dist_timeout=60,
) as trainer:
    trainer.fit()
print("trained to the end")
