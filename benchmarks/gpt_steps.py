"""Steps of a 10 M parameter GPT on two ranks, timed in turns: what the benchmarks of strategies have in common."""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
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

Train = Callable[[], list[float]]
"""Trains some steps and returns their lengths in seconds."""


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Random tokens, which notes when each batch was asked for: a step lasts from one to the next."""

    def __init__(self, num_steps: int) -> None:
        self.asked_s: list[float] = []
        tokens = torch.randint(VOCABULARY, (2 * BATCH * (num_steps + 1), LENGTH + 1))
        self._pairs = list(zip(tokens[:, :-1], tokens[:, 1:], strict=True))

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._pairs[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Return a batch's examples, as a DataLoader asks for them if it can."""
        self.asked_s.append(time.perf_counter())
        return [self._pairs[index] for index in indices]

    def step_times_s(self) -> list[float]:
        """Return the length of each step since the last call."""
        asked_s, self.asked_s = self.asked_s, []
        return [later - earlier for earlier, later in itertools.pairwise(asked_s)]


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


def by_hand(network: nn.Module, num_steps: int, check: Callable[[nn.Module], None] | None = None) -> Train:
    """Return what trains a network that is ready for several ranks, in the shortest loop.

    Args:
        network: Sharded, or wrapped by what averages the gradients.
        num_steps: How many steps are measured.
        check: Called with the network before each step of the optimizer.
    """
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    sentences, loader = make_loader(num_steps)

    def train() -> list[float]:
        for tokens, targets in loader:
            optimizer.zero_grad()
            loss_of(network(tokens), targets).backward()
            if check is not None:
                check(network)
            optimizer.step()
        return sentences.step_times_s()

    return train


def with_trainer(network: nn.Module, num_steps: int, **arguments: Any) -> Train:
    """Return what trains a network with the Trainer."""
    model = ComposerModel.from_module(network, loss_of)
    sentences, loader = make_loader(num_steps)
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        max_duration="1000000ba",
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4),
        device="cpu",
        progress_bar=False,
        seed=1,
        **arguments,
    )

    def train() -> list[float]:
        trainer.fit(duration="1ep")
        return sentences.step_times_s()

    return train


def median_steps_s(loops: Mapping[str, Train], rounds: int) -> dict[str, float]:
    """Return the median step of each loop, trained in turns."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    for train in loops.values():
        train()  # to warm up
    for _ in range(rounds):
        for name, train in loops.items():
            times[name] += train()
    return {name: statistics.median(steps) for name, steps in times.items()}


def run(measure: Callable[[int, int], Any], description: str) -> tuple[Any, argparse.Namespace]:
    """Return what rank 0 of two measured with the numbers of the command line, rounds and steps; and these."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=6, help="how often the loops take turns")
    parser.add_argument("--steps", type=int, default=8, help="of each loop in a round")
    add_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        results = run_ranks(measure, arguments.rounds, arguments.steps, store=store, world_size=2, timeout_s=600)
    num_parameters = sum(parameter.numel() for parameter in make_network().parameters())
    print(f"GPT with {num_parameters / 1e6:.1f} M parameters, 2 ranks")
    return results[0], arguments


def report(medians_s: Mapping[str, float], what: str, path: Path | None) -> None:
    """Print each loop's step, beside the one that was written by hand, and write what the rows are about."""
    plain_s = medians_s["by hand"]
    for name, median_s in medians_s.items():
        print(f"{name}: {1000 * median_s:.1f} ms, {median_s / plain_s:.3f}x")
    rows = [
        Row(what=f"{what}, {name}", ours=1000 * median_s, plain=1000 * plain_s, ratio=median_s / plain_s)
        for name, median_s in medians_s.items()
        if name != "by hand"
    ]
    write(path, rows)
