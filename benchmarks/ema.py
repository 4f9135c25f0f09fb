"""EMA over about 300 tensors: one update and one exchange of weights, against a plain loop over the parameters.

    python benchmarks/ema.py [--width 64] [--device cpu]

Prints the median times and their ratio. The loop is what one writes by hand; it neither matches names nor leaves
integer buffers alone.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rows import Row, add_option, write
from torch import Tensor, nn

from composer_algorithms.ema import EMAParameters, compute_ema

NUM_BLOCKS = 60  # five floating-point tensors each


def block_model(width: int, device: str) -> nn.Module:
    """Make 60 blocks of a linear layer and a batch norm: 240 parameters, 120 floating-point and 60 integer buffers."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(NUM_BLOCKS)]
    return nn.Sequential(*blocks).to(device)


@torch.no_grad()
def plain_update(average: dict[str, Tensor], model: nn.Module, smoothing: float) -> None:
    """Update one tensor after the other."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        average[name].copy_(smoothing * average[name] + (1 - smoothing) * tensor)


@torch.no_grad()
def plain_exchange(average: dict[str, Tensor], model: nn.Module) -> None:
    """Exchange one tensor after the other by a copy."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kept = tensor.clone()
        tensor.copy_(average[name])
        average[name] = kept


def median_ms(function: Callable[[], None], device: str, num_runs: int = 50) -> float:
    """Return the median time of a call in milliseconds, after a few calls that do not count."""
    times = []
    for run in range(num_runs + 5):
        _synchronize(device)
        start = time.perf_counter()
        function()
        _synchronize(device)
        if run >= 5:
            times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=64, help="features of each linear layer")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    add_option(parser)
    arguments = parser.parse_args()
    rows: list[Row] = []
    torch.set_num_threads(1)
    model = block_model(arguments.width, arguments.device)
    average = EMAParameters(model)
    plain = {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for what, ours, by_hand in (
        ("update", lambda: compute_ema(model, average, 0.99), lambda: plain_update(plain, model, 0.99)),
        ("exchange", lambda: average.swap_params(model), lambda: plain_exchange(plain, model)),
    ):
        ours_ms, by_hand_ms = median_ms(ours, arguments.device), median_ms(by_hand, arguments.device)
        print(f"{what}: {ours_ms:.2f} ms, plain loop {by_hand_ms:.2f} ms, {by_hand_ms / ours_ms:.1f} times as fast")
        name = f"EMA of 300 tensors, {what}, to a loop over them"
        rows.append(Row(what=name, ours=ours_ms, plain=by_hand_ms, ratio=ours_ms / by_hand_ms))
    write(arguments.json, rows)


if __name__ == "__main__":
    main()
