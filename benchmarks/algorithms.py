"""What the speed-up methods cost, next to the best plain PyTorch way to do the same.

    python benchmarks/algorithms.py [--device cpu] [--only ema] [--rounds 15]

Both of a pair take turns in one process, so that a change in the machine's load meets both. Each line has the median
times, the median of the rounds' ratios, and the ratio that the method is meant to stay within. On the CPU with one
thread, and in the processor time of the process, which includes no time that other programs had; on a GPU by the clock
on the wall.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rows import Row, add_option, write
from torch import Tensor, nn
from torchvision.models import resnet18, resnet50
from torchvision.transforms import v2

import composer_algorithms.functional as cf
from composer_algorithms import LabelSmoothing, SAMOptimizer
from composer_algorithms.ema import EMAParameters
from composer_dist import get_device
from composer_events import Event, State

Function = Callable[[], Any]

# What is quick is repeated more often than was asked for: a median of seven calls of ten milliseconds is no better than
# five percent on a machine that others use too.
LEAST_S = 2.5


@dataclass(frozen=True)
class Pair:
    """One line: ours, the plain way, and how many times as long ours may take."""

    name: str
    ours: Function
    plain: Function
    target: float


class GPT2Weights(nn.Module):
    """The 124 million parameters of GPT-2, without what it computes."""

    def __init__(self) -> None:
        super().__init__()
        width = 768
        shapes = [(50257, width), (1024, width)]
        for _ in range(12):
            shapes += [(width,)] * 4 + [(width, 3 * width), (3 * width,), (width, width), (width,)]
            shapes += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
        shapes += [(width,)] * 2
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)


def with_gradients(model: nn.Module) -> nn.Module:
    """Give each parameter a gradient."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return model


def models(device: str) -> Iterator[tuple[str, nn.Module]]:
    """Make the two models whose parameters are averaged and clipped."""
    yield "ResNet-50", resnet50().to(device)
    yield "GPT-2 124M", GPT2Weights().to(device)


def ema(device: str) -> Iterator[Pair]:
    """One update of the average."""
    for name, model in models(device):
        average = EMAParameters(model)
        average.named_buffers_dict = {}
        # The same memory for both: how fast so much of it is read depends on the pages where it happens to lie.
        own, weights = list(average.named_parameters_dict.values()), list(model.parameters())

        def plain(own: list[Tensor] = own, weights: list[Tensor] = weights) -> None:
            with torch.no_grad():
                torch._foreach_lerp_(own, weights, 0.01)

        yield Pair(f"EMA, {name}", lambda m=model, a=average: cf.compute_ema(m, a, 0.99), plain, 1.05)


def clipping(device: str) -> Iterator[Pair]:
    """Each kind of gradient clipping. The bounds are never reached, so that all calls see the same gradients."""
    for name, model in models(device):
        with_gradients(model)
        parameters = list(model.parameters())
        yield Pair(
            f"clip norm, {name}",
            lambda p=parameters: cf.apply_gradient_clipping(p, "norm", 1e6),
            lambda p=parameters: torch.nn.utils.clip_grad_norm_(p, 1e6, foreach=True),
            1.02,
        )
        yield Pair(
            f"clip value, {name}",
            lambda p=parameters: cf.apply_gradient_clipping(p, "value", 1e6),
            lambda p=parameters: torch.nn.utils.clip_grad_value_(p, 1e6, foreach=True),
            1.02,
        )
        yield Pair(
            f"clip adaptive, {name}",
            lambda p=parameters: cf.apply_gradient_clipping(p, "adaptive", 1e6),
            lambda p=parameters: clip_each(p, 1e6),
            1.0,
        )


@torch.no_grad()
def clip_each(parameters: list[Tensor], threshold: float) -> None:
    """Clip adaptively, one tensor after the other."""
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        dims = tuple(range(1, parameter.ndim)) or None
        weight_norm = torch.linalg.vector_norm(parameter, dim=dims, keepdim=dims is not None)
        gradient_norm = torch.linalg.vector_norm(gradient, dim=dims, keepdim=dims is not None)
        gradient.mul_((threshold * weight_norm / gradient_norm).nan_to_num_(nan=1.0).clamp_(max=1.0))


def batches(device: str) -> Iterator[Pair]:
    """Methods that change a batch of 128 images of 224 x 224 pixels."""
    x, y = torch.rand(128, 3, 224, 224, device=device), torch.randint(1000, (128,), device=device)
    yield Pair("MixUp", lambda: cf.mixup_batch(x, y, 0.3), x.clone, 1.5)

    box, indices = (40, 50, 150, 180), torch.randperm(128, device=device)

    def plain_cutmix() -> Tensor:
        mixed = x.clone()
        mixed[:, :, 40:150, 50:180] = x[:, :, 40:150, 50:180][indices]
        return mixed

    yield Pair("CutMix", lambda: cf.cutmix_batch(x, y, bbox=box, indices=indices), plain_cutmix, 1.1)

    def plain_cutout() -> Tensor:
        cut = x.clone()
        cut[:, :, 56:168, 56:168].fill_(0)
        return cut

    yield Pair("CutOut", lambda: cf.cutout_batch(x, 1, 0.5), plain_cutout, 1.1)

    def plain_colout() -> Tensor:
        rows, columns = (torch.randperm(224)[:190].sort().values.to(device) for _ in range(2))
        kept = x.index_select(-2, rows)
        return kept.gather(-1, columns.expand(*kept.shape[:-1], -1))

    yield Pair("ColOut", lambda: cf.colout_batch(x, 0.15, 0.15), plain_colout, 1.1)


def images(device: str) -> Iterator[Pair]:
    """RandAugment and AugMix of single images of 224 x 224 pixels; on the CPU, where data is loaded."""
    del device
    interpolation = v2.InterpolationMode.BILINEAR  # which ours have
    tensors = [torch.randint(256, (3, 224, 224), dtype=torch.uint8) for _ in range(40)]
    for kind, samples in (("PIL", [v2.functional.to_pil_image(tensor) for tensor in tensors]), ("uint8", tensors)):
        ours, theirs = cf.randaugment_image(), v2.RandAugment(num_ops=2, magnitude=9, interpolation=interpolation)
        yield Pair(f"RandAugment, {kind}", each(ours, samples), each(theirs, samples), 1.0)
        ours, theirs = cf.augmix_image(), v2.AugMix(interpolation=interpolation)
        yield Pair(f"AugMix, {kind}", each(ours, samples), each(theirs, samples), 1.0)


def each(function: Callable[[Any], Any], samples: list[Any]) -> Function:
    """Return a function that calls another one for each sample."""
    return lambda: [function(sample) for sample in samples]


def label_smoothing(device: str) -> Iterator[Pair]:
    """Smoothed targets and their loss, forward and backward, for 2048 rows of 32768 classes."""
    logits = torch.randn(2048, 32768, device=device, requires_grad=True)
    targets = torch.randint(32768, (2048,), device=device)
    state = State(nn.Identity(), rank_zero_seed=0, device=get_device("gpu" if device == "cuda" else "cpu"))
    algorithm = LabelSmoothing(0.1)

    def ours() -> None:
        state.batch, state.outputs = (None, targets), logits
        algorithm.apply(Event.BEFORE_LOSS, state, None)
        F.cross_entropy(logits, state.batch[1]).backward()
        algorithm.apply(Event.AFTER_LOSS, state, None)
        logits.grad = None

    def plain() -> None:
        F.cross_entropy(logits, targets, label_smoothing=0.1).backward()
        logits.grad = None

    yield Pair("LabelSmoothing", ours, plain, 1.1)


def steps(device: str) -> Iterator[Pair]:
    """Whole steps of training with selective backprop and with SAM."""
    model = resnet18(num_classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, y = torch.randn(64, 3, 64, 64, device=device), torch.randint(10, (64,), device=device)

    def train(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    def ours_selective() -> None:
        train(*cf.select_using_loss(x, y, model, F.cross_entropy, keep=0.5))
        optimizer.step()

    def plain_selective() -> None:
        with torch.no_grad():
            losses = F.cross_entropy(model(x), y, reduction="none")
            kept = losses.argsort()[32:]
        train(x[kept], y[kept])
        optimizer.step()

    yield Pair("SelectiveBackprop step", ours_selective, plain_selective, 1.05)

    sam = SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), rho=0.05)
    parameters = list(model.parameters())

    def plain_sam() -> None:
        train(x, y)
        with torch.no_grad():
            gradients = [parameter.grad for parameter in parameters]
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            steps = torch._foreach_mul(gradients, 0.05 / (norm + 1e-12))
            torch._foreach_add_(parameters, steps)
        train(x, y)
        with torch.no_grad():
            torch._foreach_sub_(parameters, steps)
        optimizer.step()

    yield Pair("SAM step", lambda: sam.step(lambda: train(x, y)), plain_sam, 1.02)


GROUPS: dict[str, Callable[[str], Iterator[Pair]]] = {
    "ema": ema,
    "clipping": clipping,
    "batches": batches,
    "images": images,
    "label_smoothing": label_smoothing,
    "steps": steps,
}


def in_turns(functions: Sequence[Function], device: str, rounds: int) -> list[list[float]]:
    """Return the times of each function's calls in milliseconds, one of each for every round.

    They take turns, and every round begins with another one. There are more rounds than asked for where all of them
    together take less than `LEAST_S`.
    """
    clock = time.perf_counter if device == "cuda" else time.process_time
    times: list[list[float]] = [[] for _ in functions]
    round_, spent_s = 0, 0.0
    while round_ < rounds + 2 or spent_s < LEAST_S:
        for index in (*range(round_ % len(functions), len(functions)), *range(round_ % len(functions))):
            _synchronize(device)
            start = clock()
            functions[index]()
            _synchronize(device)
            elapsed_s = clock() - start
            if round_ >= 2:  # the first ones do not count
                times[index].append(1000 * elapsed_s)
                spent_s += elapsed_s
        round_ += 1
    return times


def median_ratio(ours: Sequence[float], plain: Sequence[float]) -> float:
    """Return the median of the ratios of times that were taken in turns."""
    return statistics.median(one / other for one, other in zip(ours, plain, strict=True))


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", choices=list(GROUPS))
    parser.add_argument("--rounds", type=int, default=15)
    add_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows: list[Row] = []
    print(f"{'':24}{'ms':>10}{'plain ms':>10}{'ratio':>8}{'target':>8}")
    for name, group in GROUPS.items():
        if arguments.only not in (None, name):
            continue
        for pair in group(arguments.device):
            times = in_turns((pair.ours, pair.plain), arguments.device, arguments.rounds)
            (ours, plain), ratio = map(statistics.median, times), median_ratio(*times)
            is_met = round(ratio, 2) <= pair.target
            rows.append(
                Row(what=pair.name, ours=ours, plain=plain, ratio=ratio, budget=f"{pair.target:.2f}", is_met=is_met)
            )
            over = "" if is_met else "  over"
            print(f"{pair.name:24}{ours:10.3f}{plain:10.3f}{ratio:8.2f}{pair.target:8.2f}{over}", flush=True)
    write(arguments.json, rows)


if __name__ == "__main__":
    main()
