"""A training with short batches, in which rank 1 gets stuck when there is a file `stick`, and ends by a file `end`."""

import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, Trainer
from composer.models import ComposerClassifier
from composer.utils import dist

FOLDER = Path(sys.argv[1])


class Steered(Callback):
    """What is steered by files."""

    def batch_end(self, state, logger):
        """Look for the files."""
        time.sleep(0.02)
        if (FOLDER / "end").exists():
            state.stop_training()
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first and os.environ["RANK"] == "1" and (FOLDER / "stick").exists():
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()


def main():
    """Train until told to end."""
    torch.set_num_threads(1)
    dist.initialize_dist("cpu", timeout=120)
    samples = TensorDataset(torch.randn(400, 4), torch.zeros(400, dtype=torch.long))
    model = ComposerClassifier(torch.nn.Linear(4, 2), num_classes=2)
    Trainer(
        model=model,
        train_dataloader=DataLoader(samples, batch_size=4, sampler=dist.get_sampler(samples)),
        max_duration="1000ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        device="cpu",
        progress_bar=False,
        callbacks=Steered(),
        save_folder=str(FOLDER / "checkpoints"),
        save_overwrite=True,
        save_interval="10ba",
        save_num_checkpoints_to_keep=1,
    ).fit()


if __name__ == "__main__":
    main()
