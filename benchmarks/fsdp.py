"""A sharded step of a 10 M parameter GPT through the Trainer, against a loop written by hand, on two ranks over gloo.

    python benchmarks/fsdp.py [--rounds 6] [--steps 8]

Both call `fully_shard` on each block and on the whole, and train in the same two processes, in turns, one thread each.
Printed are the median times of a step on rank 0, their ratio, and the collectives of a step.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

from composer import Trainer
from composer.models import ComposerModel
from composer_dist import dist
from composer_dist.testing import run_ranks
from composer_models.gpt import GPT, GPTBlock, GPTConfig

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH, BATCH = 8192, 320, 6, 5, 64, 2


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


def make_loader(num_steps: int) -> tuple[Sentences, DataLoader]:
    """Return a dataset for so many steps and one more, and this rank's loader of it."""
    sentences = Sentences(num_steps)
    return sentences, DataLoader(sentences, batch_size=BATCH, sampler=dist.get_sampler(sentences))


def make_network() -> nn.Module:
    """Return a GPT with tied embeddings, whose blocks are units."""
    torch.manual_seed(0)
    config = {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": LENGTH}
    network = GPT(GPTConfig.from_any(config))
    for module in network.modules():
        if isinstance(module, GPTBlock):
            vars(module)["_fsdp_wrap"] = True
    return network


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of the next token."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def by_hand(num_steps: int) -> Callable[[], list[float]]:
    """Return a function that trains some steps in a loop of its own and returns their lengths."""
    network = make_network()
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in [module for module in network.modules() if isinstance(module, GPTBlock)]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    sentences, loader = make_loader(num_steps)

    def train() -> list[float]:
        for tokens, targets in loader:
            optimizer.zero_grad()
            loss_of(network(tokens), targets).backward()
            optimizer.step()
        return sentences.step_times_s()

    return train


def with_trainer(num_steps: int) -> Callable[[], list[float]]:
    """Return a function that trains some steps with the Trainer and returns their lengths."""
    model = ComposerModel.from_module(make_network(), loss_of)
    sentences, loader = make_loader(num_steps)
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        max_duration="1000000ba",
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4),
        parallelism_config={"fsdp": {}},
        device="cpu",
        progress_bar=False,
        seed=1,
    )

    def train() -> list[float]:
        trainer.fit(duration="1ep")
        return sentences.step_times_s()

    return train


def count_collectives(train: Callable[[], object]) -> Counter[str]:
    """Return how often each collective ran."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        train()
    return Counter(event.name for event in profiler.events() if event.name.startswith("c10d::"))


def measure(rounds: int, num_steps: int) -> tuple[int, dict[str, float], dict[str, Counter[str]]]:
    """Return the number of parameters, the median step in seconds and the collectives of each loop, in turns."""
    loops = {"by hand": by_hand(num_steps), "Trainer": with_trainer(num_steps)}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for train in loops.values():
        train()  # to warm up
    for _ in range(rounds):
        for name, train in loops.items():
            times[name] += train()
    collectives = {name: count_collectives(train) for name, train in loops.items()}
    num_parameters = sum(parameter.numel() for parameter in make_network().parameters())
    return num_parameters, {name: statistics.median(steps) for name, steps in times.items()}, collectives


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6, help="how often the loops take turns")
    parser.add_argument("--steps", type=int, default=8, help="of each loop in a round")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        num_parameters, medians, collectives = run_ranks(
            measure, arguments.rounds, arguments.steps, store=store, world_size=2, timeout_s=600
        )[0]
    print(f"GPT with {num_parameters / 1e6:.1f} M parameters, 2 ranks")
    for name, median_s in medians.items():
        counts = ", ".join(
            f"{count} {what.removeprefix('c10d::')}" for what, count in sorted(collectives[name].items())
        )
        print(f"{name}: {1000 * median_s:.1f} ms, {median_s / medians['by hand']:.3f}x")
        print(f"  in {arguments.steps + 1} steps: {counts}")


if __name__ == "__main__":
    main()
