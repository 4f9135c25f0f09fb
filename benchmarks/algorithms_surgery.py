"""Layers of the algorithms that rebuild models, each against the best plain PyTorch that computes the same.

    python benchmarks/algorithms_surgery.py [--device cpu]

Prints the medians of interleaved runs in one process and their ratios. Forward and backward, except where it says so.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rows import Row, add_option, write
from torch import Tensor, nn
from torchvision.models import resnet50
from torchvision.models.resnet import BasicBlock, Bottleneck

import composer_algorithms.functional as cf
from composer_algorithms.blurpool import BlurConv2d, BlurMaxPool2d
from composer_algorithms.ghost_batchnorm import GhostBatchNorm2d
from composer_algorithms.squeeze_excite import SqueezeExcite2d

Run = Callable[[], object]


def backward(function: Callable[[Tensor], Tensor], x: Tensor) -> Run:
    """Make a run of forward and backward."""

    def run() -> None:
        function(x).sum().backward()

    return run


def blurpool(device: str) -> list[tuple[str, list[Run]]]:
    """Blur and convolution, forward; and pooling, then blur."""
    x = torch.randn(16, 64, 56, 56, device=device)
    conv = nn.Conv2d(64, 128, 3, stride=2, padding=1, bias=False).to(device)
    blurring, pooling = BlurConv2d.from_conv2d(conv), BlurMaxPool2d(3, 2, 1).to(device)
    kernel = (torch.tensor([1.0, 2.0, 1.0]).outer(torch.tensor([1.0, 2.0, 1.0])) / 16).to(device)
    depthwise = kernel.repeat(64, 1, 1, 1)

    def plain_conv() -> Tensor:
        return F.conv2d(F.conv2d(x, depthwise, padding=1, groups=64), conv.weight, stride=2, padding=1)

    def plain_pool() -> Tensor:
        return F.conv2d(F.max_pool2d(x, 3, 1, 1), depthwise, stride=2, padding=1, groups=64)

    return [
        ("BlurConv2d forward", [lambda: blurring(x), plain_conv]),
        ("BlurMaxPool2d forward", [lambda: pooling(x), plain_pool]),
    ]


def weight_standardization(device: str) -> list[tuple[str, list[Run]]]:
    """All filters of a ResNet-50, against a layer norm each."""
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = resnet50().to(device, memory_format=memory_format)
        convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        weights = [conv.weight for conv in convs]
        plain = [weight.detach().clone().contiguous().requires_grad_() for weight in weights]
        cf.apply_weight_standardization(model)
        found.append(
            (
                f"WeightStandardization, {str(memory_format).removeprefix('torch.')}",
                [
                    lambda convs=convs: [conv.weight for conv in convs],
                    lambda plain=plain: [F.layer_norm(one, one.shape[1:], eps=1e-10) for one in plain],
                ],
            )
        )
    return found


def ghost_batchnorm(device: str) -> list[tuple[str, list[Run]]]:
    """A loop over chunks, and one batch norm of a view in which ghost batches are channels."""
    x = torch.randn(128, 64, 28, 28, device=device, requires_grad=True)
    groups = 4
    norm = nn.BatchNorm2d(64).to(device)
    ghost = GhostBatchNorm2d(nn.BatchNorm2d(64).to(device), 128 // groups)
    weight, bias = norm.weight, norm.bias

    def loop(x: Tensor) -> Tensor:
        return torch.cat([norm(chunk) for chunk in x.chunk(groups)])

    def one_call(x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        view = x.view(groups, n // groups, c, h, w).transpose(0, 1).reshape(n // groups, groups * c, h, w)
        out = F.batch_norm(view, None, None, weight.repeat(groups), bias.repeat(groups), True)
        return out.view(n // groups, groups, c, h, w).transpose(0, 1).reshape(n, c, h, w)

    return [("GhostBatchNorm2d", [backward(ghost, x), backward(loop, x), backward(one_call, x)])]


def squeeze_excite(device: str) -> list[tuple[str, list[Run]]]:
    """The same linear layers on means, and 1x1 convolutions on pooled images."""
    x = torch.randn(32, 128, 28, 28, device=device, requires_grad=True)
    layer = SqueezeExcite2d(128, 32).to(device)
    first, second = (one.weight for one in layer.pool_and_mlp if isinstance(one, nn.Linear))

    def linears(x: Tensor) -> Tensor:
        hidden = F.linear(x.mean((2, 3)), first).relu()
        return x * F.linear(hidden, second).sigmoid()[:, :, None, None]

    def convolutions(x: Tensor) -> Tensor:
        hidden = F.conv2d(F.adaptive_avg_pool2d(x, 1), first[:, :, None, None]).relu()
        return x * F.conv2d(hidden, second[:, :, None, None]).sigmoid()

    return [("SqueezeExcite2d", [backward(layer, x), backward(linears, x), backward(convolutions, x)])]


def stochastic_depth(device: str) -> list[tuple[str, list[Run]]]:
    """A plain residual block for whole blocks that are kept, and torchvision's own operator for examples."""
    from torchvision.ops import stochastic_depth as operator

    x = torch.randn(16, 64, 28, 28, device=device, requires_grad=True)
    found = []
    for name, make in (
        ("ResNetBasicBlock", lambda: BasicBlock(64, 64)),
        ("ResNetBottleneck", lambda: Bottleneck(64, 16)),
    ):
        plain, block, sample = make().to(device), make().to(device), make().to(device)
        cf.apply_stochastic_depth(block, name, "block", drop_rate=1e-9)
        cf.apply_stochastic_depth(sample, name, "sample", drop_rate=0.2)

        def with_operator(x: Tensor, plain: nn.Module = plain) -> Tensor:
            out = plain.relu(plain.bn1(plain.conv1(x)))
            out = plain.bn2(plain.conv2(out))
            if hasattr(plain, "bn3"):
                out = plain.bn3(plain.conv3(plain.relu(out)))
            return plain.relu(operator(out, 0.2, "row") + x)

        found.append((f"StochasticDepth block, {name}", [backward(block, x), backward(plain, x)]))
        found.append((f"StochasticDepth sample, {name}", [backward(sample, x), backward(with_operator, x)]))
    return found


def interleaved_medians_ms(runs: list[Run], device: str, num_rounds: int) -> list[float]:
    """Time one run after the other, round after round, so that all see the same machine."""
    times: list[list[float]] = [[] for _ in runs]
    for round_number in range(num_rounds + 3):
        for run, own_times in zip(runs, times, strict=True):
            _synchronize(device)
            start = time.perf_counter()
            run()
            _synchronize(device)
            if round_number >= 3:
                own_times.append(time.perf_counter() - start)
    return [1000 * statistics.median(own_times) for own_times in times]


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=40)
    add_option(parser)
    arguments = parser.parse_args()
    rows: list[Row] = []
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for make in (blurpool, weight_standardization, ghost_batchnorm, squeeze_excite, stochastic_depth):
        for name, runs in make(arguments.device):
            ours, *plain = interleaved_medians_ms(runs, arguments.device, arguments.rounds)
            forms = ", ".join(f"{one:.3f}" for one in plain)
            print(f"{name}: {ours:.3f} ms, plain {forms} ms, {ours / min(plain):.3f} of the best")
            rows.append(Row(what=name, ours=ours, plain=min(plain), ratio=ours / min(plain)))
    write(arguments.json, rows)


if __name__ == "__main__":
    main()
