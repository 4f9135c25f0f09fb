"""A training with two ranks, of which rank 1 is slow in a given part, or stops once at batch 55."""

import os
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

from composer import Callback, Trainer
from composer.models import ComposerClassifier
from composer.utils import dist

FAULT, NUM_BATCHES, FOLDER = sys.argv[1], int(sys.argv[2]), sys.argv[3]
IS_FAULTY = os.environ["RANK"] == "1"
IS_FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
SLOW_S = 0.01  # per sample, or 40 ms per batch


class Samples(Dataset):
    """Samples that rank 1 may read slowly."""

    def __len__(self):
        return 8 * NUM_BATCHES

    def __getitem__(self, index):
        if FAULT in ("data", "hang") and (IS_FAULTY or FAULT == "hang"):
            time.sleep(SLOW_S)
        return torch.randn(4), 0


class Fault(Callback):
    """What is slow, or stops."""

    def batch_end(self, state, logger):
        """Take time after each batch."""
        if FAULT == "nothing" or (FAULT == "callback" and IS_FAULTY):
            time.sleep(4 * SLOW_S)
        if FAULT == "hang" and IS_FAULTY and IS_FIRST and state.timestamp.num_batches == 55:
            time.sleep(10_000)


def main():
    """Train for the given number of batches."""
    torch.set_num_threads(1)
    dist.initialize_dist("cpu", timeout=120)
    samples, model = Samples(), ComposerClassifier(torch.nn.Linear(4, 2), num_classes=2)
    Trainer(
        model=model,
        train_dataloader=DataLoader(samples, batch_size=4, sampler=dist.get_sampler(samples)),
        max_duration=f"{NUM_BATCHES}ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        device="cpu",
        progress_bar=False,
        callbacks=Fault(),
        run_name="slow",
        **(
            {"save_folder": f"{FOLDER}/checkpoints", "save_interval": "20ba", "autoresume": True}
            if FAULT == "hang"
            else {}
        ),
    ).fit()


if __name__ == "__main__":
    main()
