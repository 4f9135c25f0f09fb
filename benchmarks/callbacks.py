"""What callbacks and loggers add to training: ratios to the same run without them, and a budget for each.

    python benchmarks/callbacks.py [--quick] [--turns N] [--rounds N]

Ten callbacks and three loggers watch a network whose step takes about 10 ms of one thread. Within one training they
take turns with nobody, 13 steps each, so that both meet the same machine, network and memory. What is compared is the
training thread's processor time: what others do beside it delays no step. Steps differ, as some callbacks act at every
10th or 100th and the progress bar is drawn twice a second, so the ratio is of the median steps of each kind, by how
many of a kind there are. The metric of each batch is computed in either case. The weights must come out equal to those
of a training that nobody watches.

The second table is about long runs, with a step that takes next to nothing: the ratio to a run without over the last
quarter, beside that over the first; and the memory that the callbacks hold at the end, beside what they held at first.
A logger that keeps everything, such as the one in memory, grows by what it is for, and is left out.
The exit status is 1 if a budget is broken.
"""

import argparse
import io
import statistics
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

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
STEPS_IN_TURN = 13
WARMUP_TURNS = 20
REDRAWN_S = 0.5  # by the progress bar
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
    callbacks = [clock, *ten_callbacks()] if is_watched else [clock]
    trainer, network = make_trainer(batches, steps, callbacks, loggers(Sink(), keeps_all) if is_watched else [])
    with trainer:
        trainer.fit()
    return [after - before for before, after in zip(clock.times_s, clock.times_s[1:], strict=False)], network


def calibrate() -> int:
    """Return the batch size at which a step takes about as long as is asked for."""
    size = 256
    for _ in range(8):  # time is not quite proportional, and the machine not quite even
        blocks_s, _ = timed(make_batches(False, size), 3 * BLOCK, is_watched=False, keeps_all=False)
        step_s = statistics.median(blocks_s) / BLOCK
        if abs(step_s / STEP_S - 1) < 0.03:
            break
        size = max(round(size * STEP_S / step_s), 1)
    return size


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


class TakesTurns:
    """A dataloader that lets the callbacks and loggers of its reader rest in every other turn, and times the steps.

    The first step of a turn, which pays for the change, is not counted.

    Attributes:
        watch: Is told whether they are to listen to the batches that follow.
        times_s: The training thread's processor time of each step without them, and of each with them, by kind.
    """

    def __init__(self, batches: list[Any], turns: int, sink: Sink) -> None:
        self.batches, self.turns, self.sink = batches, turns, sink
        self.watch: Callable[[bool], None] = lambda is_watched: None
        self.times_s: tuple[dict[str, list[float]], dict[str, list[float]]] = {}, {}

    def __len__(self) -> int:
        return 2 * self.turns * STEPS_IN_TURN

    def __iter__(self) -> Iterator[Any]:
        step = 0
        for turn in range(2 * self.turns):
            is_watched = turn % 2 == 1
            self.watch(is_watched)
            for index in range(STEPS_IN_TURN):
                start_s, self.sink.is_touched = time.thread_time(), False
                yield self.batches[step % len(self.batches)]
                taken_s = time.thread_time() - start_s
                step += 1
                if index > 0 and turn >= WARMUP_TURNS:
                    self.times_s[is_watched].setdefault(self._kind(step), []).append(taken_s)

    def _kind(self, step: int) -> str:
        if step % 100 in (0, 1):  # the console's block, and the activations
            return f"{step % 100} of 100"
        if step % 10 == 0:  # the optimizer's norms
            return "0 of 10"
        return "drawn" if self.sink.is_touched else "usual"


def added_s(times_s: tuple[dict[str, list[float]], dict[str, list[float]]]) -> tuple[float, float]:
    """Return how long a step takes when nobody watches, and how much longer it takes when watched."""
    plain, watched = times_s
    usual_s = statistics.median(plain["usual"])
    shares = {"0 of 10": 0.09, "0 of 100": 0.01, "1 of 100": 0.01, "drawn": usual_s / REDRAWN_S}
    shares["usual"] = 1 - sum(shares.values())
    longer = {kind: statistics.median(taken_s) - usual_s for kind, taken_s in watched.items()}
    return usual_s, sum(shares[kind] * more_s for kind, more_s in longer.items())


def measure_step(turns: int) -> Row:
    """Compare steps of 10 ms with and without callbacks and loggers, print the ratio and judge it."""
    batches, sink = make_batches(False, calibrate()), Sink()
    loader = TakesTurns(batches, turns, sink)
    destinations = loggers(sink, keeps_all=True)
    trainer, watched = make_trainer(batches, len(loader), [Clock(), *ten_callbacks()], destinations, loader)
    everybody = list(trainer.state.callbacks)

    def watch(is_watched: bool) -> None:
        trainer.state.callbacks = everybody if is_watched else everybody[:1]
        trainer.logger.destinations = destinations if is_watched else []

    loader.watch = watch
    with trainer:
        trainer.fit()
    plain, network = make_trainer(batches, len(loader), [], [])
    with plain:
        plain.fit()
    if not all(map(torch.equal, network.parameters(), watched.parameters())):
        raise AssertionError("What watches training has changed the weights.")
    step_s, more_s = added_s(loader.times_s)
    ratio = 1 + more_s / step_s
    print(f"a step of {step_s * 1e3:.1f} ms, {turns} pairs of turns, {more_s * 1e6:.0f} us added")
    print(f"{'ten callbacks, three loggers':32}{'ratio':>8}{'budget':>8}\n{'':32}{ratio:8.3f}{STEP_BUDGET:8.2f}")
    return Row(
        what="step with ten callbacks and three loggers, to one without",
        ours=(step_s + more_s) * 1e3,
        plain=step_s * 1e3,
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
    destinations = loggers(Sink(), keeps_all=False)
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
        measure_step(asked.turns or (60 if asked.quick else 200)),
        measure_growth(rounds, 8 if asked.quick else 40),
        measure_memory(1000 if asked.quick else 3000),
    ]
    write(asked.json, rows)
    return 0 if all(row.is_met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
