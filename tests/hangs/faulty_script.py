"""A training with two or more ranks, one of which gets stuck in a given way at a given batch."""

import os
import sys
import threading
import time

import torch
from torch.utils.data import DataLoader, Dataset

from composer import Callback, Trainer
from composer.models import ComposerClassifier
from composer.utils import dist

FAULT, RANK, BATCH, FOLDER = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
IS_FAULTY = int(os.environ["RANK"]) == RANK and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


class Samples(Dataset):
    """Random samples; those of a faulty rank may never arrive."""

    def __len__(self):
        return 4 * 40 * int(os.environ["WORLD_SIZE"])

    def __getitem__(self, index):
        if FAULT == "worker" and IS_FAULTY and torch.utils.data.get_worker_info().id == 0:
            _count[0] += 1
            if _count[0] > 4 * BATCH:
                time.sleep(10_000)
        return torch.randn(4), 0


_count = [0]


class Fault(Callback):
    """What gets stuck."""

    def batch_end(self, state, logger):
        """Get stuck after a batch."""
        if not IS_FAULTY or state.timestamp.num_batches != BATCH:
            return
        if FAULT == "loop":
            while True:
                pass
        if FAULT == "sleep":
            time.sleep(10_000)
        if FAULT == "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        if FAULT == "stop":
            import signal

            os.kill(os.getpid(), signal.SIGSTOP)
        if FAULT == "leave":
            os._exit(0)
        if FAULT == "order":
            dist.broadcast(torch.ones(7), src=0)
        if FAULT == "shape":
            dist.all_reduce(torch.ones(1000))

    def batch_checkpoint(self, state, logger):
        """Get stuck in place of a save."""
        if FAULT == "pipe" and IS_FAULTY and state.timestamp.num_batches == BATCH:
            os.mkfifo(f"{FOLDER}/pipe")
            with open(f"{FOLDER}/pipe", "wb") as file:
                file.write(b"weights")


def main():
    """Train for 40 batches."""
    torch.set_num_threads(1)
    dist.initialize_dist("cpu", timeout=float(os.environ.get("DIST_TIMEOUT", "120")))
    samples, model = Samples(), ComposerClassifier(torch.nn.Linear(4, 2), num_classes=2)
    loader = DataLoader(
        samples,
        batch_size=4,
        sampler=dist.get_sampler(samples),
        num_workers=FAULT == "worker",
        multiprocessing_context="fork" if FAULT == "worker" else None,
    )
    Trainer(
        model=model,
        train_dataloader=loader,
        max_duration="40ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        device="cpu",
        progress_bar=False,
        callbacks=Fault(),
    ).fit()


if __name__ == "__main__":
    main()
