"""What the Trainer costs beside a loop written by hand: ratios of processor time, and a budget for each.

    python benchmarks/trainer_overhead.py [--rounds N] [--steps N] [--case NAME ...]

A network of 874 parameters, batches of 32, SGD, one thread: work so small that the ratios are about the Trainer alone.
Each case is compared with the loop that does the same by hand, over the same DataLoader. The two take turns of 50 steps
within one run, so that a machine that slows down slows both alike; what `fit` does before its first step and after its
last is the Trainer's. The weights must come out equal. The exit status is 1 if a budget is broken.
"""

import argparse
import contextlib
import io
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rows import Row, add_option, write
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from composer import Trainer
from composer.core import Algorithm, Callback, Event
from composer.loggers import LoggerDestination
from composer.models import ComposerClassifier, ComposerModel

BATCH, NUM_FEATURES, NUM_CLASSES = 32, 16, 10
TURN = 50


class CountsBatches(Callback):
    """Listen to the begin and the end of each batch."""

    def __init__(self) -> None:
        self.num_batches = 0

    def batch_start(self, state: Any, logger: Any) -> None:
        """Do nothing."""

    def batch_end(self, state: Any, logger: Any) -> None:
        """Count."""
        self.num_batches += 1


class Keeps(LoggerDestination):
    """Keep the latest value of each metric."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep them."""
        self.latest.update(metrics)


class LooksAtBatches(Algorithm):
    """Act on each batch, and change nothing that training depends on."""

    def __init__(self, event: Event) -> None:
        self.event, self.num_batches = event, 0

    def match(self, event: Event, state: Any) -> bool:
        """Answer whether it is the event."""
        return event == self.event

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        """Count."""
        self.num_batches += 1


@dataclass(frozen=True)
class Case:
    """One way to use the Trainer, and what it may cost."""

    name: str
    budget: float
    num_microbatches: int = 1
    has_metric: bool = False
    settings: Callable[[], dict[str, Any]] = field(default=dict)


def _typical() -> dict[str, Any]:
    events = (Event.AFTER_DATALOADER, Event.AFTER_FORWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END)
    return {
        "algorithms": [LooksAtBatches(event) for event in events],
        "callbacks": [CountsBatches() for _ in range(5)],
        "loggers": [Keeps(), Keeps()],
    }


CASES = (
    Case("plain", 1.20),
    Case("progress bar and logging", 1.30, settings=lambda: {"progress_bar": True, "loggers": [Keeps()]}),
    Case("ten callbacks", 1.30, settings=lambda: {"callbacks": [CountsBatches() for _ in range(10)]}),
    Case("torchmetrics accuracy", 1.15, has_metric=True),
    Case("four microbatches", 1.20, num_microbatches=4),
    Case("typical", 2.00, num_microbatches=2, settings=_typical),
)


def make_network() -> nn.Module:
    """Return the network, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(NUM_FEATURES, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES))


def make_data(steps: int) -> TensorDataset:
    """Return what the loop and the Trainer train on."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(steps * BATCH, NUM_FEATURES, generator=generator)
    targets = torch.randint(NUM_CLASSES, (steps * BATCH,), generator=generator)
    return TensorDataset(inputs, targets)


def train_by_hand(case: Case, network: nn.Module, data: TensorDataset) -> Iterator[None]:
    """Train with a plain loop, one turn for each value that is asked for."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    metric = MulticlassAccuracy(num_classes=NUM_CLASSES, average="micro") if case.has_metric else None
    size = BATCH // case.num_microbatches
    for number, (inputs, targets) in enumerate(DataLoader(data, batch_size=BATCH), start=1):
        optimizer.zero_grad()
        if metric is not None:
            metric.reset()
        parts = [(inputs, targets)] if size == BATCH else zip(inputs.split(size), targets.split(size), strict=True)
        for part_inputs, part_targets in parts:
            outputs = network(part_inputs)
            loss = nn.functional.cross_entropy(outputs, part_targets)
            if size != BATCH:
                loss = loss * (size / BATCH)
            loss.backward()
            if metric is not None:
                metric.update(outputs.detach(), part_targets)
        optimizer.step()
        if metric is not None:
            metric.compute()
        if number % TURN == 0:
            yield


class TakesTurns(Callback):
    """Before each turn of the Trainer, run a turn of `other`, and keep the processor time of those."""

    def __init__(self, other: Iterator[None]) -> None:
        self.other, self.other_s = other, 0.0

    def after_dataloader(self, state: Any, logger: Any) -> None:
        """Run a turn of the other loop before the first batch of each turn."""
        if state.timestamp.num_batches % TURN == 0:
            start = time.process_time()
            next(self.other)
            self.other_s += time.process_time() - start


def measure(case: Case, data: TensorDataset) -> tuple[float, float]:
    """Train both ways and return the processor time by hand, and that of `fit` without it."""
    expected, network = make_network(), make_network()
    turns = TakesTurns(train_by_hand(case, expected, data))
    model = ComposerModel.from_module(network, nn.functional.cross_entropy)
    if case.has_metric:
        metric = MulticlassAccuracy(num_classes=NUM_CLASSES, average="micro")
        model = ComposerClassifier(
            network, train_metrics=metric, val_metrics=metric, loss_fn=nn.functional.cross_entropy
        )
    settings = {"progress_bar": False, **case.settings()}
    quietly = contextlib.redirect_stderr(io.StringIO())  # the progress bar is drawn all the same
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    microbatch_size = BATCH // case.num_microbatches
    settings |= {"optimizers": optimizer, "device_train_microbatch_size": microbatch_size}
    settings["callbacks"] = [turns, *settings.get("callbacks", [])]
    loader = DataLoader(data, batch_size=BATCH)
    with quietly, Trainer(model, train_dataloader=loader, max_duration="1ep", device="cpu", **settings) as trainer:
        start = time.process_time()
        trainer.fit()
        fit_s = time.process_time() - start
    check_equal(case, network, expected)
    return turns.other_s, fit_s - turns.other_s


def check_equal(case: Case, network: nn.Module, expected: nn.Module) -> None:
    """Refuse to compare with a loop that computes something else."""
    for own, other in zip(network.parameters(), expected.parameters(), strict=True):
        if not torch.equal(own, other):
            raise AssertionError(f"{case.name}: the Trainer's weights are not those of the loop by hand.")


def main() -> int:
    """Measure, print the table and return the exit status."""
    parser = argparse.ArgumentParser(description="Compare the Trainer with a loop written by hand.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--case", nargs="*", default=[case.name for case in CASES], help="only these")
    add_option(parser)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.steps % TURN:
        parser.error(f"--steps={asked.steps} is no multiple of {TURN}, the steps of a turn.")
    data = make_data(asked.steps)
    cases = [case for case in CASES if case.name in asked.case]
    times: dict[str, list[tuple[float, float]]] = {case.name: [] for case in cases}
    for number in range(asked.rounds + 1):
        for case in cases:
            measured = measure(case, data)
            if number:  # the first round warms up
                times[case.name].append(measured)
    print(f"microseconds a step, medians of {asked.rounds} rounds of {asked.steps} steps")
    print(f"{'case':28}{'by hand':>10}{'Trainer':>10}{'ratio':>8}{'budget':>8}")
    rows: list[Row] = []
    for case in cases:
        hand_us, trainer_us = (
            statistics.median(column) / asked.steps * 1e6 for column in zip(*times[case.name], strict=True)
        )
        ratio = statistics.median(trainer_s / hand_s for hand_s, trainer_s in times[case.name])
        rows.append(
            Row(
                what=f"Trainer step, {case.name}",
                ours=trainer_us,
                plain=hand_us,
                unit="us",
                ratio=ratio,
                budget=f"{case.budget:.2f}",
                is_met=ratio <= case.budget,
            )
        )
        print(f"{case.name:28}{hand_us:10.1f}{trainer_us:10.1f}{ratio:8.2f}{case.budget:8.2f}")
    write(asked.json, rows)
    return 0 if all(row.is_met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
