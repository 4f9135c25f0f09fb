"""A training script in which one rank does what it is told to: raise somewhere, die, or stop.

faulty_script.py FAULT [RANK]
"""

import os
import signal
import sys

import torch
from torch import nn

from composer import Callback, Trainer
from composer.models import ComposerModel
from composer.utils import dist

fault, faulty_rank = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
is_faulty = dist.get_global_rank() == faulty_rank
BATCH_OF_THE_FAULT = 2


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("no gradient today")


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.step = 0

    def forward(self, x):
        happens = is_faulty and self.step == BATCH_OF_THE_FAULT
        self.step += 1
        if happens and fault == "forward":
            raise ArithmeticError("no output today")
        if happens and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if happens and fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        outputs = self.linear(x)
        return InBackward.apply(outputs) if happens and fault == "backward" else outputs


class Faulty(Callback):
    def batch_end(self, state, logger):
        if is_faulty and fault == "callback" and int(state.timestamp.batch) == BATCH_OF_THE_FAULT:
            raise ArithmeticError("no callback today")


class Batches:
    def __iter__(self):
        for index in range(10):
            if is_faulty and fault == "dataloader" and index == BATCH_OF_THE_FAULT:
                raise ArithmeticError("no batch today")
            yield torch.ones(4, 2), torch.zeros(4, dtype=torch.long)


width = 3 if is_faulty and fault == "shape" else 2
network = Network() if width == 2 else nn.Linear(2, 3)
model = ComposerModel.from_module(network, nn.functional.cross_entropy)
lr = 0.2 if is_faulty and fault == "learning rate" else 0.1
with Trainer(
    model=model,
    train_dataloader=Batches(),
    device_train_microbatch_size=4,
    max_duration="10ba",
    optimizers=torch.optim.SGD(model.parameters(), lr=lr),
    callbacks=Faulty(),
    seed=7 if is_faulty and fault == "seed" else 3,
    device="cpu",
    progress_bar=False,
    dist_timeout=20,
) as trainer:
    trainer.fit()
print("trained to the end")
