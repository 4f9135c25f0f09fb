"""Steps of a 10 M parameter GPT on two ranks, timed in turns: what the benchmarks of strategies have in common."""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rows import Row, add_option, write
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from composer import Trainer
from composer.models import ComposerModel
from composer_dist import dist
from composer_dist.testing import run_ranks
from composer_models import GPTConfig
from composer_models.gpt import GPT

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH, BATCH = 8192, 320, 6, 5, 64, 2
BY_HAND = "by hand"

Steps = Iterator[None]
"""Trains one step for each value that it is asked for."""

Pairs = list[tuple[float, float]]
"""The lengths of steps in seconds, each with that of the step by hand beside it."""


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Random tokens. Before each batch others make a step each; the reader's own lasts from there to its next batch.

    Attributes:
        others: Who makes them.
        times_s: How long the steps took, by name; the reader's own are under "".
    """

    def __init__(self, num_steps: int) -> None:
        self.others: Mapping[str, Steps] = {}
        self.times_s: defaultdict[str, list[float]] = defaultdict(list)
        self._read_s: float | None = None
        tokens = torch.randint(VOCABULARY, (2 * BATCH * (num_steps + 1), LENGTH + 1))
        self._pairs = list(zip(tokens[:, :-1], tokens[:, 1:], strict=True))

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._pairs[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Return a batch's examples, as a DataLoader asks for them if it can."""
        begin_s = time.perf_counter()
        if self._read_s is not None:
            self.times_s[""].append(begin_s - self._read_s)
        for name, steps in self.others.items():
            next(steps)
            end_s = time.perf_counter()
            self.times_s[name].append(end_s - begin_s)
            begin_s = end_s
        self._read_s = begin_s
        return [self._pairs[index] for index in indices]

    def forget_last(self) -> None:
        """Leave out the steps beside one of the reader whose end is not known, since it has read no batch after it."""
        self._read_s = None
        for times_s in self.times_s.values():
            del times_s[len(self.times_s[""]) :]


def make_loader(num_steps: int) -> tuple[Sentences, DataLoader[tuple[Tensor, Tensor]]]:
    """Return a dataset for so many steps and one more, and this rank's loader of it."""
    sentences = Sentences(num_steps)
    return sentences, DataLoader(sentences, batch_size=BATCH, sampler=dist.get_sampler(sentences))


def make_network() -> GPT:
    """Return a GPT with tied embeddings."""
    torch.manual_seed(0)
    config = {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": LENGTH}
    return GPT(GPTConfig.from_any(config))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of the next token."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def by_hand(
    network: nn.Module,
    num_steps: int,
    check: Callable[[nn.Module], None] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = loss_of,
) -> Steps:
    """Train a network that is ready for several ranks, in the shortest loop, without an end.

    Args:
        network: Sharded, or wrapped by what averages the gradients.
        num_steps: How many steps an epoch has, but for one.
        check: Called with the network before each step of the optimizer.
        loss: Of the outputs and the targets.
    """
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    _, loader = make_loader(num_steps)
    while True:
        for tokens, targets in loader:
            optimizer.zero_grad()
            loss(network(tokens), targets).backward()
            if check is not None:
                check(network)
            optimizer.step()
            yield


class WithTrainer:
    """Trains a network with the Trainer, an epoch for each call."""

    def __init__(
        self, network: nn.Module, num_steps: int, *, loss: Any = loss_of, metrics: Any = None, **arguments: Any
    ) -> None:
        model = ComposerModel.from_module(network, loss, train_metrics=metrics)
        self.sentences, loader = make_loader(num_steps)
        given = {"progress_bar": False, **arguments}
        self.trainer = Trainer(
            model=model,
            train_dataloader=loader,
            max_duration="1000000ba",
            optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4),
            device="cpu",
            seed=1,
            **given,
        )

    def __call__(self, others: Mapping[str, Steps]) -> None:
        """Train, while others make as many steps, one by one."""
        self.sentences.others = others
        self.trainer.fit(duration="1ep")
        self.sentences.forget_last()


def in_turns(hands: Mapping[str, Steps], trainers: Mapping[str, WithTrainer], rounds: int) -> dict[str, Pairs]:
    """Return the steps of each loop but the one by hand, each beside one by hand that was made right before."""
    for steps in hands.values():
        next(steps)
    for train in trainers.values():
        train({})  # to warm up
        train.sentences.times_s.clear()
    for _ in range(rounds):
        for train in trainers.values():
            train(hands)
    pairs: dict[str, Pairs] = {name: [] for name in hands if name != BY_HAND}
    for name, train in trainers.items():
        times_s = train.sentences.times_s
        pairs[name] = list(zip(times_s[""], times_s[BY_HAND], strict=True))
        for other in hands:
            if other != BY_HAND:
                pairs[other] += zip(times_s[other], times_s[BY_HAND], strict=True)
    return pairs


def run(measure: Callable[[int, int], Any], description: str) -> tuple[Any, argparse.Namespace]:
    """Return what rank 0 of two measured with the numbers of the command line, rounds and steps; and these."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=6, help="how often each Trainer trains")
    parser.add_argument("--steps", type=int, default=8, help="of each loop in a round")
    add_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        results = run_ranks(measure, arguments.rounds, arguments.steps, store=store, world_size=2, timeout_s=600)
    num_parameters = sum(parameter.numel() for parameter in make_network().parameters())
    print(f"GPT with {num_parameters / 1e6:.1f} M parameters, 2 ranks")
    return results[0], arguments


def report(pairs: Mapping[str, Pairs], what: str, path: Path | None, budgets: Mapping[str, float]) -> list[Row]:
    """Print each loop's step beside the one that was written by hand, and write and return what the rows are about.

    A ratio is the median of those of neighbours, since a machine that is busy is so for longer than two steps.
    """
    rows: list[Row] = []
    for name, of_loop in pairs.items():
        ratios = [own / plain for own, plain in of_loop]
        ratio, (low, _, high) = statistics.median(ratios), statistics.quantiles(ratios)
        budget = budgets.get(name)
        row = Row(
            what=f"{what}, {name}",
            ours=1000 * statistics.median(own for own, _ in of_loop),
            plain=1000 * statistics.median(plain for _, plain in of_loop),
            ratio=ratio,
            budget="" if budget is None else f"{budget:.2f}",
            is_met=None if budget is None else ratio <= budget,
        )
        print(
            f"{row.what}: {row.ours:.2f} ms beside {row.plain:.2f} ms by hand, {ratio:.3f}x (half of {len(ratios)} "
            f"pairs are within {low:.3f} and {high:.3f})"
        )
        rows.append(row)
    write(path, rows)
    return rows
