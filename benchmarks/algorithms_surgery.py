"""Layers of the algorithms that rebuild models, each against the best plain PyTorch that computes the same.

    python benchmarks/algorithms_surgery.py [--device cpu] [--only blurpool] [--rounds 40]

Prints the medians of interleaved runs in one process, measured as in algorithms.py, and the median of the ratios to the
best plain form. Forward and backward, except where it says so.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from algorithms import in_turns, median_ratio
from rows import Row, add_option, write
from torch import Tensor, nn
from torchvision.models import resnet50
from torchvision.models.resnet import BasicBlock, Bottleneck

import composer_algorithms.functional as cf
from composer_algorithms.blurpool import BlurConv2d, BlurMaxPool2d
from composer_algorithms.ghost_batchnorm import GhostBatchNorm2d
from composer_algorithms.squeeze_excite import SqueezeExcite2d
from composer_models.gpt import GPT, GPTConfig

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
    """All filters of a ResNet-50, against a layer norm of the same memory each. None is kept: nothing is allocated."""
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = resnet50().to(device, memory_format=memory_format)
        convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        weights = [conv.weight.detach() for conv in convs]
        if memory_format == torch.channels_last:
            weights = [weight.permute(0, 2, 3, 1) for weight in weights]
        plain = [weight.requires_grad_() for weight in weights]
        cf.apply_weight_standardization(model)

        def ours(convs: list[nn.Conv2d] = convs) -> None:
            for conv in convs:
                conv.weight  # noqa: B018  # a name would keep it for as long as the next one is computed

        def layer_norms(plain: list[Tensor] = plain) -> None:
            for one in plain:
                F.layer_norm(one, one.shape[1:], eps=1e-10)

        name = f"WeightStandardization, {str(memory_format).removeprefix('torch.')}"
        found.append((name, [ours, layer_norms]))
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


class HandWritten(nn.Module):
    """The attention of a GPT with normalized queries and keys, or with values of the first layer."""

    def __init__(self, attention: nn.Module, kept: dict[str, Tensor], is_first: bool, method: str) -> None:
        super().__init__()
        self.attention, self.kept, self.is_first, self.method = attention, kept, is_first, method
        self.scale = nn.Parameter(torch.tensor(8.0))
        self.mix = nn.Parameter(torch.tensor([0.5, 0.5]))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute causal attention."""
        own = self.attention
        q, k, v = own.qkv(x).unflatten(-1, (3, own.n_heads, -1)).permute(2, 0, 3, 1, 4)
        if self.method == "QKNorm":
            q, k = F.rms_norm(q, q.shape[-1:], eps=1e-6) * self.scale, F.rms_norm(k, k.shape[-1:], eps=1e-6)
        elif self.is_first:
            self.kept["values"] = v
        else:
            v = self.mix[0] * v + self.mix[1] * self.kept["values"]
        return own.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class SquaredReLU(nn.Module):
    """The activation as the paper writes it."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute the square."""
        return F.relu(x) ** 2


def language_models(device: str) -> list[tuple[str, list[Run]]]:
    """Loss and gradients of a GPT of two layers, against one with the method in its own code."""
    vocabulary, cap, weight = 2048, 30.0, 1e-4
    config = GPTConfig(d_model=256, n_heads=4, n_layers=2, vocab_size=vocabulary, max_seq_len=128, device=device)
    ids = torch.randint(vocabulary, (8, 128), device=device)
    after_next = F.pad(ids[:, 2:], (0, 2), value=-100)

    def cross_entropy(logits: Tensor, targets: Tensor = ids) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def run(model: nn.Module, loss: Callable[[Tensor], Tensor] = cross_entropy) -> Run:
        return lambda: loss(model(ids)).backward()

    def with_attention(method: str) -> Run:
        model, kept = GPT(config), {}
        for index, block in enumerate(model.blocks):
            block.attn = HandWritten(block.attn, kept, index == 0, method).to(device)
        return run(model)

    def changed(change: Callable[[nn.Module], object]) -> nn.Module:
        model = GPT(config)
        change(model)
        return model

    squared = GPT(config)
    for block in squared.blocks:
        block.mlp[1] = SquaredReLU()

    def capped(logits: Tensor) -> Tensor:
        return cross_entropy(torch.tanh(logits / cap) * cap)

    def with_z_loss(logits: Tensor) -> Tensor:
        return cross_entropy(logits) + weight * cf.z_loss(logits)

    def with_own_z_loss(logits: Tensor) -> Tensor:
        return cross_entropy(logits) + weight * logits.logsumexp(-1).square().mean()

    predicting = changed(cf.apply_multi_token_prediction)
    plain, head = GPT(config), nn.Linear(256, 256, device=device)
    hidden: list[Tensor] = []
    plain.ln_f.register_forward_hook(lambda module, args, output: hidden.append(output))

    def with_head(logits: Tensor) -> Tensor:
        states = hidden.pop()
        states = states + F.silu(head(states))
        return cross_entropy(logits) + cross_entropy(F.linear(states, plain.output_weight), after_next)

    def with_heads(logits: Tensor) -> Tensor:
        return cross_entropy(logits) + cf.multi_token_loss(predicting.multi_token_heads.take_logits(), ids)

    return [
        ("QKNorm, step of a GPT", [run(changed(cf.apply_qk_norm)), with_attention("QKNorm")]),
        ("ValueResidual, step of a GPT", [run(changed(cf.apply_value_residual)), with_attention("ValueResidual")]),
        ("SquaredReLU, step of a GPT", [run(changed(cf.apply_squared_relu)), run(squared)]),
        ("LogitSoftcap, step of a GPT", [run(changed(cf.apply_logit_softcap)), run(GPT(config), capped)]),
        ("ZLoss, step of a GPT", [run(GPT(config), with_z_loss), run(GPT(config), with_own_z_loss)]),
        ("MultiTokenPrediction, step of a GPT", [run(predicting, with_heads), run(plain, with_head)]),
    ]


BUDGETS = {
    blurpool: 1.05,
    weight_standardization: 1.1,
    ghost_batchnorm: 1.05,
    squeeze_excite: 1.05,
    stochastic_depth: 1.05,
    language_models: 1.05,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", choices=[make.__name__ for make in BUDGETS])
    parser.add_argument("--rounds", type=int, default=40)
    add_option(parser)
    arguments = parser.parse_args()
    rows: list[Row] = []
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for make, budget in BUDGETS.items():
        if arguments.only not in (None, make.__name__):
            continue
        for name, runs in make(arguments.device):
            ours, *plain = in_turns(runs, arguments.device, arguments.rounds)
            best = min(plain, key=statistics.median)
            forms = ", ".join(f"{statistics.median(one):.3f}" for one in plain)
            ratio, ours_ms, best_ms = median_ratio(ours, best), statistics.median(ours), statistics.median(best)
            is_met = round(ratio, 2) <= budget
            over = "" if is_met else ", over"
            print(f"{name}: {ours_ms:.3f} ms, plain {forms} ms, {ratio:.3f} of the best, at most {budget:.2f}{over}")
            rows.append(Row(what=name, ours=ours_ms, plain=best_ms, ratio=ratio, budget=f"{budget:.2f}", is_met=is_met))
    write(arguments.json, rows)


if __name__ == "__main__":
    main()
