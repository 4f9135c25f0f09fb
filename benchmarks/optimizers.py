"""How long a step of the decoupled optimizers takes, next to the optimizers of PyTorch that they derive from.

    .venv/bin/python benchmarks/optimizers.py [--json PATH]

Both of a pair step the same shapes in turn, so that a change in the machine's load meets both; the ratio is that of
the medians. One thread, CPU.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rows import Row, add_option, write
from torch.optim import SGD, AdamW, Optimizer

from composer_optim import DecoupledAdamW, DecoupledSGDW

NUM_ROUNDS = 200
SHAPES = {"300 tensors of 64 x 16": [(64, 16)] * 300, "one tensor of 2048 x 2048": [(2048, 2048)]}


def main() -> None:
    """Print one line for each pair, kernel and set of shapes."""
    parser = argparse.ArgumentParser(description="Time a step of the decoupled optimizers beside torch's.")
    add_option(parser)
    path = parser.parse_args().json
    rows: list[Row] = []
    torch.set_num_threads(1)
    print(f"{'tensors':28}{'kernel':10}{'optimizer':16}{'ms':>9}{'torch ms':>10}{'ratio':>8}")
    for name, shapes in SHAPES.items():
        for kernel in ("foreach", "fused"):
            options = {kernel: True}
            pairs: list[tuple[Callable[..., Optimizer], Callable[..., Optimizer], dict[str, float]]] = [
                (DecoupledAdamW, AdamW, {}),
                (DecoupledSGDW, SGD, {"momentum": 0.9}),
            ]
            for ours, theirs, more in pairs:
                first = make(ours, shapes, weight_decay=1e-4, **options, **more)
                second = make(theirs, shapes, weight_decay=1e-4, **options, **more)
                mine, reference = medians_ms(first, second)
                title = type(first).__name__
                print(f"{name:28}{kernel:10}{title:16}{mine:9.3f}{reference:10.3f}{mine / reference:8.3f}")
                what = f"{title}.step, {kernel}, {name}"
                rows.append(Row(what=what, ours=mine, plain=reference, ratio=mine / reference))
    write(path, rows)


def make(optimizer: Callable[..., Optimizer], shapes: list[tuple[int, ...]], **options: object) -> Optimizer:
    """Make an optimizer over parameters that have gradients."""
    params = [torch.randn(shape, requires_grad=True) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return optimizer(params, lr=1e-3, **options)


def medians_ms(*optimizers: Optimizer) -> list[float]:
    """Return the median time of a step of each, which take turns."""
    times: list[list[float]] = [[] for _ in optimizers]
    for round_ in range(NUM_ROUNDS + 5):  # the first rounds make the state
        for each, optimizer in zip(times, optimizers, strict=True):
            start = time.perf_counter()
            optimizer.step()
            if round_ >= 5:
                each.append(1000 * (time.perf_counter() - start))
    return [statistics.median(each) for each in times]


if __name__ == "__main__":
    main()
