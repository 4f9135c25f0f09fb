"""What callbacks and loggers add to training: ratios to the same run without them, and a budget for each.

    python benchmarks/callbacks.py [--quick] [--turns N] [--rounds N]

Ten callbacks and three loggers watch a network whose step takes about 10 ms of one thread. Within one training they
take turns with nobody, 50 steps each, so that both meet the same machine, network and memory. The ratio is the median
of those of the turns, of the training thread's processor time: what others do beside it delays no step. The metric of
each batch is computed in either case. The weights must come out equal to those of a training that nobody watches.

The second table is about long runs, with a step that takes next to nothing: the ratio to a run without over the last
quarter, beside that over the first; and the memory that the callbacks hold at the end, beside what they held at first.
A logger that keeps everything, such as the one in memory, grows by what it is for, and is left out.
The exit status is 1 if a budget is broken.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rows import Row, add_option, write
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import composer.callbacks
from composer import Trainer
from composer.callbacks import (
    ActivationMonitor,
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
STEP_S = 0.010
BATCHES_IN_EPOCH = 50
STEP_BUDGET = 1.02
GROWTH_BUDGET = 1.10  # of a step that is all overhead
MEMORY_BUDGET_BYTES = 16 * 1024
BLOCK = 100  # batches between two looks at the clock


def ten_callbacks() -> list[Callback]:
    """Return ten that work on a CPU too."""
    return [
        SpeedMonitor(window_size=100),
        LRMonitor(),
        RuntimeEstimator(),
        MemoryMonitor(),
        OptimizerMonitor(),
        ActivationMonitor(interval="100ba", whole_outputs=True),
        NaNMonitor(),
        EarlyStopper("MulticlassAccuracy", "train", patience="1000ep"),
        ThresholdStopper("MulticlassAccuracy", "train", 2.0),
        SystemMetricsMonitor(),
    ]


@contextlib.contextmanager
def loggers(keeps_all: bool) -> Iterator[list[LoggerDestination]]:
    """Make three loggers, or two where none may keep everything; what they print goes nowhere."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        yield [
            ConsoleLogger(log_interval="100ba", stream=nowhere),
            ProgressBarLogger(nowhere),
            *([InMemoryLogger()] if keeps_all else []),
        ]


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


class Tally(Callback):
    """Asks twice what memory the callbacks' own code holds."""

    def __init__(self, *batches: int) -> None:
        self.batches, self.sizes_bytes = batches, []

    def batch_end(self, state: Any, logger: Any) -> None:
        """Ask, if it is time."""
        if int(state.timestamp.batch) in self.batches:
            folder = str(Path(composer.callbacks.__file__).parent / "*")
            held = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, folder)])
            self.sizes_bytes.append(sum(trace.size for trace in held.traces))


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
    with loggers(keeps_all) as destinations:
        callbacks = [clock, *ten_callbacks()] if is_watched else [clock]
        trainer, network = make_trainer(batches, steps, callbacks, destinations if is_watched else [])
        with trainer:
            trainer.fit()
    return [after - before for before, after in zip(clock.times_s, clock.times_s[1:], strict=False)], network


def calibrate() -> int:
    """Return the batch size at which a step takes about as long as is asked for."""
    size = 32
    for _ in range(3):  # time is not quite proportional
        blocks_s, _ = timed(make_batches(False, size), 2 * BLOCK, is_watched=False, keeps_all=False)
        size = max(round(size * STEP_S * BLOCK / blocks_s[-1]), 1)
    return size


class TakesTurns:
    """A dataloader that lets the callbacks and loggers of its reader rest in the first half of each epoch.

    Attributes:
        watch: Is told whether they are to listen to the batches that follow.
        times_s: The training thread's processor time of each half without them, and of each half with them.
    """

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.watch: Callable[[bool], None] = lambda is_watched: None
        self.times_s: tuple[list[float], list[float]] = [], []
        self._turn: tuple[bool, float] | None = None

    def __len__(self) -> int:
        return 2 * len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for is_watched in (False, True):
            self.end_turn()
            self.watch(is_watched)
            self._turn = is_watched, time.thread_time()
            yield from self.batches

    def end_turn(self) -> None:
        """Keep how long the latest turn has taken."""
        if self._turn is not None:
            is_watched, start_s = self._turn
            self.times_s[is_watched].append(time.thread_time() - start_s)


def measure_step(turns: int) -> Row:
    """Compare steps of 10 ms with and without callbacks and loggers, print the ratio and judge it."""
    batches = make_batches(False, calibrate())
    steps = (turns + 1) * 2 * BATCHES_IN_EPOCH
    loader = TakesTurns(batches)
    with loggers(keeps_all=True) as destinations:
        trainer, watched = make_trainer(batches, steps, [Clock(), *ten_callbacks()], destinations, loader)
        everybody = list(trainer.state.callbacks)

        def watch(is_watched: bool) -> None:
            trainer.state.callbacks = everybody if is_watched else everybody[:1]
            trainer.logger.destinations = destinations if is_watched else []

        loader.watch = watch
        with trainer:
            trainer.fit()
            loader.end_turn()
    plain, network = make_trainer(batches, steps, [], [])
    with plain:
        plain.fit()
    if not all(map(torch.equal, network.parameters(), watched.parameters())):
        raise AssertionError("What watches training has changed the weights.")
    without_s, with_s = (times[1:] for times in loader.times_s)  # the first turn loads and warms up
    ratio = statistics.median(with_ / without for without, with_ in zip(without_s, with_s, strict=True))
    print(f"a step of {statistics.median(without_s) / BATCHES_IN_EPOCH * 1e3:.1f} ms, {turns} pairs of turns")
    print(f"{'ten callbacks, three loggers':32}{'ratio':>8}{'budget':>8}\n{'':32}{ratio:8.3f}{STEP_BUDGET:8.2f}")
    without_ms, with_ms = (statistics.median(times) / BATCHES_IN_EPOCH * 1e3 for times in (without_s, with_s))
    return Row(
        what="step with ten callbacks and three loggers, to one without",
        ours=with_ms,
        plain=without_ms,
        ratio=ratio,
        budget=f"{STEP_BUDGET:.2f}",
        is_met=ratio <= STEP_BUDGET,
    )


def measure_growth(rounds: int, blocks: int) -> Row:
    """Compare what is added late in a long run with what is added early; print and judge as above."""
    batches = make_batches(True, 2)
    early: list[float] = []
    late: list[float] = []
    part = max(blocks // 4, 1)
    for _ in range(rounds):
        without_s, _ = timed(batches, (blocks + 1) * BLOCK, is_watched=False, keeps_all=False)
        with_s, _ = timed(batches, (blocks + 1) * BLOCK, is_watched=True, keeps_all=False)
        ratios = [with_ / without for with_, without in zip(with_s[1:], without_s[1:], strict=True)]
        early += ratios[:part]
        late += ratios[-part:]
    early_ratio, late_ratio = statistics.median(early), statistics.median(late)
    growth = late_ratio / early_ratio
    print(f"{'a run of ' + str((blocks + 1) * BLOCK) + ' steps':32}{'early':>10}{'late':>10}{'growth':>8}{'budget':>8}")
    print(f"{'ratio, of an empty step':32}{early_ratio:10.2f}{late_ratio:10.2f}{growth:8.2f}{GROWTH_BUDGET:8.2f}")
    return Row(
        what="what they add to an empty step late in a run, to early",
        ours=late_ratio,
        plain=early_ratio,
        unit="",
        ratio=growth,
        budget=f"{GROWTH_BUDGET:.2f}",
        is_met=growth <= GROWTH_BUDGET,
    )


def measure_memory(steps: int) -> Row:
    """Compare what memory the callbacks hold late with what they hold early; print and judge as above."""
    tally = Tally(4 * BLOCK, steps)
    tracemalloc.start()
    with loggers(keeps_all=False) as destinations:
        trainer, _ = make_trainer(make_batches(True, 2), steps, [*ten_callbacks(), tally], destinations)
        with trainer:
            trainer.fit()
    tracemalloc.stop()
    early, late = tally.sizes_bytes
    print(f"{'held by callbacks, bytes':32}{early:10}{late:10}{late - early:8}{MEMORY_BUDGET_BYTES:8}")
    return Row(
        what="memory by which ten callbacks grow in a long run",
        ours=late - early,
        unit="bytes",
        budget=f"{MEMORY_BUDGET_BYTES} bytes",
        is_met=late - early <= MEMORY_BUDGET_BYTES,
    )


def main() -> int:
    """Measure, print the tables and return the exit status."""
    parser = argparse.ArgumentParser(description="Measure what callbacks and loggers add to training.")
    parser.add_argument("--quick", action="store_true", help="a short look, for a machine that is otherwise idle")
    parser.add_argument("--turns", type=int, default=None, help="with and without")
    parser.add_argument("--rounds", type=int, default=None, help="runs of the second table")
    add_option(parser)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rounds = asked.rounds or (3 if asked.quick else 7)
    rows = [
        measure_step(asked.turns or (20 if asked.quick else 60)),
        measure_growth(rounds, 8 if asked.quick else 40),
        measure_memory(1000 if asked.quick else 3000),
    ]
    write(asked.json, rows)
    return 0 if all(row.is_met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
