"""Count the files that a training step, the construction of a Trainer, a save and a load pass through.

    rooms.py [--json] [-v]

A file ("room") is entered when one of its functions is called. "changes" counts the moves from one file to another.
`-v` lists the files with the number of calls.
"""

import collections
import gc
import json
import os
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.algorithms import GradientClipping, LabelSmoothing
from composer.callbacks import LRMonitor, SpeedMonitor
from composer.core import Callback
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier

ROOT = str(Path(__file__).resolve().parent.parent) + os.sep


class Recorder:
    """Counts the calls of the project's functions while it is entered, on all threads."""

    def __init__(self):
        self.calls, self.rooms, self.changes, self.last = collections.Counter(), collections.Counter(), 0, None

    def __call__(self, frame, event, arg):  # noqa: D102
        if event != "call":
            return
        name = frame.f_code.co_filename
        if name.startswith(ROOT) and "/src/composer" in name:
            room = name.split("/src/")[1]
            self.calls[room, frame.f_code.co_qualname] += 1
            self.rooms[room] += 1
            self.changes += room != self.last
            self.last = room

    def __enter__(self):
        gc.collect()  # or the end of an earlier Trainer might be counted
        gc.disable()
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()

    def result(self):
        """Return the counts."""
        return {
            "rooms": len(self.rooms),
            "functions": len(self.calls),
            "calls": sum(self.calls.values()),
            "changes": self.changes,
        }


class FourthStep(Callback):
    """Records from before the fourth batch is fetched until before the fifth is."""

    def __init__(self, recorder):
        self.recorder = recorder

    def before_dataloader(self, state, logger):
        """Begin and end."""
        if state.timestamp.batch == 3:
            self.recorder.__enter__()
        elif state.timestamp.batch == 4:
            self.recorder.__exit__()


def trainer(**arguments):
    """Return a Trainer of a small classifier."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    return Trainer(
        model=ComposerClassifier(network, num_classes=3),
        train_dataloader=DataLoader(data, batch_size=8),
        max_duration="6ba",
        optimizers=torch.optim.SGD(network.parameters(), lr=0.1),
        progress_bar=False,
        device="cpu",
        **arguments,
    )


def main():
    """Measure, and print what was found."""
    warnings.simplefilter("ignore")
    found = {}
    watched = {
        "algorithms": [LabelSmoothing(0.1), GradientClipping("norm", 1.0)],
        "callbacks": [SpeedMonitor(), LRMonitor()],
        "loggers": [InMemoryLogger()],
    }
    steps = {"step": {}, "watched step": watched}
    for name, arguments in steps.items():
        recorder = Recorder()
        callbacks = [FourthStep(recorder), *arguments.pop("callbacks", [])]
        with trainer(callbacks=callbacks, **arguments) as run:
            run.fit()
        recorder.__exit__()
        found[name] = recorder
    with Recorder() as found["init"]:
        run = trainer()
    run.fit()
    path = os.path.join(tempfile.mkdtemp(), "whole.pt")
    with Recorder() as found["save"]:
        run.save_checkpoint(path)
    run.close()
    files = [str(file) for file in Path(path).parent.rglob("*") if file.is_file()]
    from composer.utils import checkpoint

    other = trainer()
    with Recorder() as found["load"]:
        checkpoint.load_checkpoint(max(files, key=os.path.getsize), other.state, other.logger)
    other.close()
    results = {name: recorder.result() for name, recorder in found.items()}
    if "--json" in sys.argv:
        print(json.dumps(results))
        return
    for name, row in results.items():
        print(f"{name:<13}" + "  ".join(f"{key} {value}" for key, value in row.items()))
        if "-v" in sys.argv:
            print("\n".join(f"    {count:>6} {room}" for room, count in found[name].rooms.most_common()))


if __name__ == "__main__":
    main()
