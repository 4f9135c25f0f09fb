"""Language models: the fused cross entropy, and compilation by region, against all logits and the whole model.

    python benchmarks/language_models.py [--layers 12]

Prints the time and peak memory of loss and backward pass at a vocabulary of 50,000, and the time to the first step of a
compiled GPT, in processes of their own. Their cache is empty but for what torch compiles once per machine: its headers
and its test of the vector instructions, which take longer than all blocks of the GPT.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rows import Row, add_option, write
from torch import nn
from torch.utils.data import DataLoader

from composer_models import linear_cross_entropy

TOKENS, FEATURES, CLASSES = 2048, 256, 50_000


def peak_bytes(compute: Callable[[], object]) -> int:
    """Return the most memory that is allocated within a function on the CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        compute()
    events = profiler.profiler.kineto_results.events()
    current = peak = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        current += size
        peak = max(peak, current)
    return peak


def seconds(compute: Callable[[], object]) -> float:
    """Return the least time of three calls."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        compute()
        times.append(time.perf_counter() - start)
    return min(times)


def loss_rows() -> list[Row]:
    """Compare loss and backward pass."""
    hidden = torch.randn(TOKENS, FEATURES, requires_grad=True)
    head = nn.Linear(FEATURES, CLASSES, bias=False)
    target = torch.randint(CLASSES, (TOKENS,))
    inputs = (hidden, head.weight)

    def plain() -> object:
        return torch.autograd.grad(F.cross_entropy(head(hidden), target), inputs)

    def fused() -> object:
        return torch.autograd.grad(linear_cross_entropy(hidden, head.weight, target).loss, inputs)

    rows = []
    for what, unit, measure, budget in (
        (
            "memory of loss and backward pass, 50,000 classes, FusedCrossEntropy",
            "MB",
            lambda run: peak_bytes(run) / 1e6,
            0.35,
        ),
        ("time of the same", "ms", lambda run: 1000 * seconds(run), 1.5),
    ):
        ours, theirs = measure(fused), measure(plain)
        ratio = ours / theirs
        text = f"at most {budget} of plain"
        rows.append(
            Row(what=what, ours=ours, unit=unit, plain=theirs, ratio=ratio, budget=text, is_met=ratio <= budget)
        )
    return rows


def start(num_layers: int, regions: str) -> None:
    """Train a compiled GPT for one step, and print the time that this took."""
    from composer import Trainer
    from composer.models import ComposerGPT

    sizes = {"d_model": 64, "n_heads": 4, "n_layers": num_layers, "vocab_size": 256, "max_seq_len": 64}
    model = ComposerGPT(sizes)
    samples = [{"input_ids": one, "labels": one} for one in torch.randint(256, (4, 64))]
    with Trainer(
        model,
        train_dataloader=DataLoader(samples, batch_size=4),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="1ba",
        compile_config={"regions": regions or False},
        progress_bar=False,
    ) as trainer:
        x = torch.ones(64, requires_grad=True)
        torch.compile(lambda x: (x + 1).sum())(x).backward()  # what torch compiles once per machine
        begin = time.perf_counter()
        trainer.fit()
        print(time.perf_counter() - begin)


def start_row(num_layers: int) -> Row:
    """Compare the start of a GPT compiled by region with that of one compiled as a whole."""
    times: dict[str, float] = {}
    for regions in ("auto", ""):
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--layers", str(num_layers), "--start", regions]
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            times[regions] = float(done.stdout.split()[-1])
    ratio = times["auto"] / times[""]
    what = f"first step of a compiled GPT of {num_layers} layers, by region and as a whole"
    budget = "at most 0.5 of the whole"
    return Row(
        what=what, ours=times["auto"], unit="s", plain=times[""], ratio=ratio, budget=budget, is_met=ratio <= 0.5
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--start", help=argparse.SUPPRESS)
    add_option(parser)
    arguments = parser.parse_args()
    if arguments.start is not None:
        return start(arguments.layers, arguments.start)
    rows = [*loss_rows(), start_row(arguments.layers)]
    for row in rows:
        print(f"{row.what}: {row.ours:.1f} {row.unit}, plain {row.plain:.1f} {row.unit}, ratio {row.ratio:.2f}")
    write(arguments.json, rows)
    return None


if __name__ == "__main__":
    main()
