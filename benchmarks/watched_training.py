"""A training that ten callbacks and three loggers watch, for the benchmarks of what they add to it."""

import io
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from composer import Trainer
from composer.callbacks import (
    CheckpointSaver,
    EarlyStopper,
    LRMonitor,
    MemoryMonitor,
    NaNMonitor,
    OptimizerMonitor,
    RuntimeEstimator,
    SpeedMonitor,
    SystemMetricsMonitor,
    ThresholdStopper,
)
from composer.core import Callback
from composer.loggers import ConsoleLogger, InMemoryLogger, LoggerDestination, ProgressBarLogger
from composer.models import ComposerClassifier

WIDTH, DEPTH, NUM_CLASSES = 256, 4, 10
BATCHES_IN_EPOCH = 50
BLOCK = 100  # batches between two looks at the clock
CHECKPOINTS = tempfile.TemporaryDirectory()  # until the process ends


def ten_callbacks() -> list[Callback]:
    """Return ten that work on a CPU too."""
    return [
        SpeedMonitor(window_size=100),
        LRMonitor(),
        RuntimeEstimator(),
        MemoryMonitor(),
        OptimizerMonitor(),
        NaNMonitor(),
        EarlyStopper("MulticlassAccuracy", "train", patience="1000ep"),
        ThresholdStopper("MulticlassAccuracy", "train", 2.0),
        SystemMetricsMonitor(),
        CheckpointSaver(folder=tempfile.mkdtemp(dir=CHECKPOINTS.name), save_interval="1000ep"),
    ]


def loggers(stream: TextIO, keeps_all: bool) -> list[LoggerDestination]:
    """Return three loggers, or two where none may keep everything."""
    three = [ConsoleLogger(log_interval="100ba", stream=stream), ProgressBarLogger(stream), InMemoryLogger()]
    return three if keeps_all else three[:2]


@dataclass
class Clock(Callback):
    """Looks at the processor's time every so many batches; part of the runs without callbacks, too."""

    times_s: list[float] = field(default_factory=list)

    def batch_start(self, state: Any, logger: Any) -> None:
        """Look, before the first batch of a block."""
        if int(state.timestamp.batch) % BLOCK == 0:
            self.times_s.append(time.thread_time())

    def fit_end(self, state: Any, logger: Any) -> None:
        """Look a last time."""
        self.times_s.append(time.thread_time())


class Sink(io.TextIOBase):
    """A text stream that keeps nothing.

    Attributes:
        is_touched: Whether anything was written since somebody said otherwise.
    """

    is_touched = False

    def write(self, text: str) -> int:
        """Take the text."""
        self.is_touched = True
        return len(text)


def make_network(is_tiny: bool) -> nn.Module:
    """Return a network, always with the same weights."""
    torch.manual_seed(0)
    width = 4 if is_tiny else WIDTH
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, NUM_CLASSES))


def make_batches(is_tiny: bool, batch_size: int) -> list[Any]:
    """Return an epoch."""
    generator = torch.Generator().manual_seed(1)
    width = 4 if is_tiny else WIDTH
    return [
        (
            torch.randn(batch_size, width, generator=generator),
            torch.randint(NUM_CLASSES, (batch_size,), generator=generator),
        )
        for _ in range(BATCHES_IN_EPOCH)
    ]


def make_trainer(
    batches: list[Any], steps: int, callbacks: Sequence[Callback], destinations: Sequence[Any], loader: Any = None
) -> tuple[Trainer, nn.Module]:
    """Return what trains for so many steps, and the network that it trains."""
    inputs, _ = batches[0]
    network = make_network(is_tiny=inputs.shape[1] != WIDTH)
    accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
    model = ComposerClassifier(network, train_metrics=accuracy, num_classes=NUM_CLASSES)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*only works on CUDA devices", UserWarning)
        trainer = Trainer(
            model,
            train_dataloader=loader or batches,
            max_duration=f"{steps}ba",
            optimizers=torch.optim.SGD(network.parameters(), lr=0.01),
            device_train_microbatch_size=len(inputs),
            callbacks=list(callbacks),
            loggers=list(destinations),
            progress_bar=False,
            device="cpu",
            seed=1,
        )
    return trainer, network


def timed(batches: list[Any], steps: int, is_watched: bool, keeps_all: bool) -> tuple[list[float], nn.Module]:
    """Return the processor time of each block of batches, and the network."""
    clock = Clock()
    callbacks = [clock, *ten_callbacks()] if is_watched else [clock]
    trainer, network = make_trainer(batches, steps, callbacks, loggers(Sink(), keeps_all) if is_watched else [])
    with trainer:
        trainer.fit()
    return [after - before for before, after in zip(clock.times_s, clock.times_s[1:], strict=False)], network
