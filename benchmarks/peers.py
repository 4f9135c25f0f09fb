"""What a training loop costs: ours, Lightning's Trainer and Accelerate, beside a loop written by hand.

    python benchmarks/peers.py [--rounds 9] [--steps 400]

The network, data and optimizer of each are the same, batches of 32 and SGD, on one thread; Lightning and Accelerate
take part where they are installed. All have what costs time and has nothing to do with the loop switched off: progress
bars, loggers, checkpoints. They take turns in one process. A step lasts from one batch being asked for to the next, in
the processor time of the process, so that what they do before and after training does not count. Printed are medians,
and the median of the rounds' ratios to the loop by hand. All must end with equal weights.

Composer itself cannot take part: its package has the same name, `composer`, so that one of the two is installed.
"""

import argparse
import importlib.util
import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from rows import Row, add_option, write
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.models import ComposerModel

BATCH, NUM_FEATURES, NUM_CLASSES = 32, 16, 10
WIDTHS = {"a network of 874 parameters": 32, "a network of 0.6 million parameters": 768}

Loop = Callable[[], object]
"""Trains the network for one epoch."""


class Batches(DataLoader[Any]):
    """The same batches in the same order for everybody, with the time at which each was asked for.

    Args:
        num_steps: How many steps are measured: there is a batch more, after which the last one ends.
    """

    def __init__(self, num_steps: int) -> None:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn((num_steps + 1) * BATCH, NUM_FEATURES, generator=generator)
        targets = torch.randint(NUM_CLASSES, (len(inputs),), generator=generator)
        super().__init__(TensorDataset(inputs, targets), batch_size=BATCH)
        self._asked_s: list[float] = []

    def __iter__(self) -> Any:
        """Read the batches."""
        batches = super().__iter__()
        return self._timed(batches)

    def _timed(self, batches: Any) -> Iterator[Any]:
        for batch in batches:
            self._asked_s.append(time.process_time())
            yield batch

    def step_s(self) -> float:
        """Return the median time from a batch to the next since the last call."""
        asked_s, self._asked_s = self._asked_s, []
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(asked_s))


def make_network(width: int) -> nn.Module:
    """Return the network, always with the same weights."""
    torch.manual_seed(0)
    depth = 1 if width < 100 else 2
    hidden = [layer for _ in range(depth - 1) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(NUM_FEATURES, width), nn.ReLU(), *hidden, nn.Linear(width, NUM_CLASSES))


def make_optimizer(network: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer without a state, so that training may go on with another one."""
    return torch.optim.SGD(network.parameters(), lr=0.05)


def by_hand(network: nn.Module, batches: Batches) -> Loop:
    """The loop that all are compared with."""
    optimizer = make_optimizer(network)

    def train() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            F.cross_entropy(network(inputs), targets).backward()
            optimizer.step()

    return train


def ours(network: nn.Module, batches: Batches) -> Loop:
    """The Trainer as it is by default, but for the progress bar."""
    trainer = Trainer(
        model=ComposerModel.from_module(network, F.cross_entropy),
        train_dataloader=batches,
        max_duration="1000000ba",
        optimizers=make_optimizer(network),
        device="cpu",
        progress_bar=False,
    )
    return lambda: trainer.fit(duration="1ep")


def with_lightning(network: nn.Module, batches: Batches) -> Loop:
    """Lightning's Trainer; a new one for each epoch, since it trains once."""
    import lightning  # only where it takes part

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            inputs, targets = batch
            return F.cross_entropy(self.network(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.network)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings: dict[str, Any] = {**dict.fromkeys(off, False), "max_epochs": 1, "accelerator": "cpu", "devices": 1}
    module = Module()
    return lambda: lightning.Trainer(**settings).fit(module, batches)


def with_accelerate(network: nn.Module, batches: Batches) -> Loop:
    """A loop by hand with what Accelerate has prepared."""
    from accelerate import Accelerator  # only where it takes part

    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(network, make_optimizer(network))

    def train() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(prepared(inputs), targets))
            optimizer.step()

    return train


LOOPS: Mapping[str, Callable[[nn.Module, Batches], Loop]] = {"by hand": by_hand, "Trainer": ours}
PEERS = {"lightning": ("Lightning", with_lightning), "accelerate": ("Accelerate", with_accelerate)}


def loops() -> dict[str, Callable[[nn.Module, Batches], Loop]]:
    """Return those that take part here."""
    installed = [peer for module, peer in PEERS.items() if importlib.util.find_spec(module) is not None]
    return {**LOOPS, **dict(installed)}


def measure(width: int, rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Return the step of each loop in each round, in seconds."""
    networks = {name: make_network(width) for name in loops()}
    batches = Batches(num_steps)
    trains = {name: make(networks[name], batches) for name, make in loops().items()}
    times_s: dict[str, list[float]] = {name: [] for name in trains}
    for number in range(rounds + 1):
        names = list(trains) if number % 2 else list(reversed(trains))
        for name in names:
            trains[name]()
            step_s = batches.step_s()
            if number:  # the first round warms up
                times_s[name].append(step_s)
    expected = list(networks["by hand"].parameters())
    for name, network in networks.items():
        if not all(map(torch.equal, network.parameters(), expected)):
            raise AssertionError(f"{name}: the weights are not those of the loop by hand.")
    return times_s


def report(what: str, times_s: Mapping[str, list[float]]) -> Row:
    """Print the medians and the ratios to the loop by hand."""
    plain_s = times_s["by hand"]
    ratios = {
        name: statistics.median(one / plain for one, plain in zip(times, plain_s, strict=True))
        for name, times in times_s.items()
    }
    us = {name: 1e6 * statistics.median(times) for name, times in times_s.items()}
    print(f"{what}, a step of")
    for name, ratio in ratios.items():
        print(f"  {name:12}{us[name]:9.1f} us{ratio:8.2f}")
    plain, own = us.pop("by hand"), us.pop("Trainer")
    return Row(what=f"step of {what}", ours=own, plain=plain, peers=us, unit="us", ratio=ratios["Trainer"])


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description="Compare training loops.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=400)
    add_option(parser)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Lightning's about workers of the DataLoader
    rows = [report(what, measure(width, asked.rounds, asked.steps)) for what, width in WIDTHS.items()]
    write(asked.json, rows)


if __name__ == "__main__":
    main()
