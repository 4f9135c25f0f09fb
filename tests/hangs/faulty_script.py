"""A training with two or more ranks, one of which gets stuck in a given way at a given batch.

The variable `FAULT_AT` is the event of the batch, or seconds after its start.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from composer import Callback, Event, Trainer
from composer.models import ComposerClassifier
from composer.utils import dist

FAULT, RANK, BATCH, FOLDER = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
IS_FAULTY = int(os.environ["RANK"]) == RANK and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
AT = os.environ.get("FAULT_AT", "batch_end")


class Samples(Dataset):
    """Random samples; those of a faulty rank may never arrive."""

    def __len__(self):
        return 4 * 40 * int(os.environ["WORLD_SIZE"])

    def __getitem__(self, index):
        if FAULT == "worker" and IS_FAULTY and torch.utils.data.get_worker_info().id == 0:
            _count[0] += 1
            if _count[0] > 4 * BATCH:
                Path(FOLDER, "began").touch()
                time.sleep(10_000)
        return torch.randn(4), 0


_count = [0]


def get_stuck(*_):
    """Get stuck."""
    Path(FOLDER, "began").touch()
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
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "leave":
        os._exit(0)
    if FAULT == "order":
        dist.broadcast(torch.ones(7), src=0)
    if FAULT == "shape":
        dist.all_reduce(torch.ones(1000))
    if FAULT == "pipe":
        os.mkfifo(f"{FOLDER}/pipe")
        with open(f"{FOLDER}/pipe", "wb") as file:
            file.write(b"weights")


class Fault(Callback):
    """Gets stuck at the given moment."""

    def run_event(self, event, state, logger):
        """Get stuck on an event, or at any moment of the main thread after it."""
        if not IS_FAULTY or FAULT == "worker" or state.timestamp.num_batches != BATCH:
            return
        moment = "batch_checkpoint" if FAULT == "pipe" else AT  # no event if it is `close`
        if event.value == moment:
            get_stuck()
        if event == Event.BATCH_START and moment[0].isdigit():
            signal.signal(signal.SIGALRM, get_stuck)
            signal.setitimer(signal.ITIMER_REAL, float(moment))

    def close(self, state, logger):
        """Get stuck at the end of the training."""
        if IS_FAULTY and AT == "close":
            get_stuck()


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
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        max_duration="40ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        device="cpu",
        progress_bar=False,
        callbacks=Fault(),
    )
    trainer.fit()
    if FAULT == "sleep":  # otherwise the end of Python closes it
        trainer.close()


if __name__ == "__main__":
    main()
