"""How long a step of the optimizers and schedules takes, next to those of PyTorch that they derive from or resemble.

    .venv/bin/python benchmarks/optimizers.py [--json PATH]

Both of a pair step the same shapes in turn, so that a change in the machine's load meets both; the ratio is that of
the medians. Muon is compared with PyTorch's in bfloat16, the only dtype of the latter, and with its matrix products
alone. A step of a schedule sets two parameter groups, next to PyTorch's LambdaLR with a linear factor. One thread, CPU.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from rows import Row, add_option, write
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from composer_optim import (
    CosineAnnealingScheduler,
    CosineAnnealingWithWarmupScheduler,
    DecoupledAdamW,
    DecoupledSGDW,
    InversePowerWithWarmupScheduler,
    LinearScheduler,
    MultiStepScheduler,
    Muon,
    Schedule,
    WarmupStableDecayScheduler,
    compile_composer_schedulers,
)
from composer_time import Time, Timestamp

NUM_ROUNDS, NUM_MUON_ROUNDS = 200, 15
SHAPES = {"300 tensors of 64 x 16": [(64, 16)] * 300, "one tensor of 2048 x 2048": [(2048, 2048)]}
MATRICES = {
    "12 matrices of 256 x 256": [(256, 256)] * 12,
    "4 matrices of 1024 x 256": [(1024, 256)] * 4,
    "one matrix of 768 x 768": [(768, 768)],
}


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
    rows += muon_rows()
    rows += schedule_rows()
    write(path, rows)


def muon_rows() -> list[Row]:
    """Compare Muon with torch's Muon and with its matrix products alone, and print a line for each."""
    rows: list[Row] = []
    for name, shapes in MATRICES.items():
        ours, theirs = make(_muon(torch.bfloat16), shapes), make(torch.optim.Muon, shapes)
        pairs: list[tuple[str, float, Callable[[], object], Callable[[], object]]] = [
            ("bfloat16, beside torch.optim.Muon", 1.02, ours.step, theirs.step),
            ("float32, beside its products", 1.05, make(_muon(torch.float32), shapes).step, products(shapes)),
        ]
        for kind, budget, mine, plain in pairs:
            first, second = medians_of(mine, plain, num_rounds=NUM_MUON_ROUNDS)
            ratio = first / second
            print(f"{name:28}{kind:42}{first:9.3f}{second:10.3f}{ratio:8.3f}")
            what = f"Muon.step, {kind}, {name}"
            limit = f"ratio at most {budget}"
            rows.append(Row(what=what, ours=first, plain=second, ratio=ratio, budget=limit, is_met=ratio <= budget))
    return rows


def schedule_rows() -> list[Row]:
    """Compare a step of each schedule with one of torch's LambdaLR, and print a line for each."""
    schedules: list[Any] = [
        LinearScheduler(),
        CosineAnnealingScheduler(),
        CosineAnnealingWithWarmupScheduler("10ba"),
        MultiStepScheduler(["0.5dur", "0.75dur"]),
        WarmupStableDecayScheduler("10ba"),
        InversePowerWithWarmupScheduler("10ba"),
        Schedule("weight_decay", LinearScheduler()),
        Schedule("momentum", LinearScheduler(0.85, 0.95), absolute=True),
    ]
    rows: list[Row] = []
    for schedule in schedules:
        groups = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)]}]
        optimizer = SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1)
        linear = LambdaLR(SGD(groups, lr=0.1), lambda step: 1 - step / 10_000)
        state: Any = SimpleNamespace(
            timestamp=Timestamp(batch=300), max_duration=Time(1000, "ba"), dataloader_len=None, optimizers=[optimizer]
        )
        (compiled,) = compile_composer_schedulers([schedule], state)
        optimizer.step()  # or the schedulers warn
        linear.optimizer.step()
        mine, plain = medians_of(compiled.step, linear.step, num_rounds=NUM_ROUNDS)
        kind = f" of {schedule.target}" if isinstance(schedule, Schedule) else ""
        title = f"{type(schedule).__name__}{kind}"
        print(f"{'2 groups':28}{title:42}{mine:9.3f}{plain:10.3f}{mine / plain:8.3f}")
        rows.append(Row(what=f"step of {title}, beside LambdaLR", ours=mine, plain=plain, ratio=mine / plain))
    return rows


def _muon(dtype: torch.dtype) -> Callable[..., Optimizer]:
    def make_muon(params: list[torch.Tensor], lr: float) -> Optimizer:
        return Muon([{"params": params, "role": "muon"}], lr=lr, adjust_lr_fn="original", dtype=dtype)

    return make_muon


def products(shapes: list[tuple[int, ...]]) -> Callable[[], None]:
    """Return a function that computes the products of five Newton-Schulz steps for each matrix."""
    wide = [torch.randn(min(shape), max(shape)) / max(shape) for shape in shapes]

    def run() -> None:
        for x in wide:
            for _ in range(5):
                gram = x @ x.mT
                torch.addmm(x, torch.addmm(gram, gram, gram), x)

    return run


def make(optimizer: Callable[..., Optimizer], shapes: list[tuple[int, ...]], **options: object) -> Optimizer:
    """Make an optimizer over parameters that have gradients."""
    params = [torch.randn(shape, requires_grad=True) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return optimizer(params, lr=1e-3, **options)


def medians_ms(*optimizers: Optimizer) -> list[float]:
    """Return the median time of a step of each, which take turns."""
    return medians_of(*(optimizer.step for optimizer in optimizers), num_rounds=NUM_ROUNDS)


def medians_of(*functions: Callable[[], object], num_rounds: int) -> list[float]:
    """Return the median time of each function, which take turns, in milliseconds."""
    times: list[list[float]] = [[] for _ in functions]
    for round_ in range(num_rounds + 5):  # the first rounds make the state
        for each, function in zip(times, functions, strict=True):
            start = time.perf_counter()
            function()
            if round_ >= 5:
                each.append(1000 * (time.perf_counter() - start))
    return [statistics.median(each) for each in times]


if __name__ == "__main__":
    main()
