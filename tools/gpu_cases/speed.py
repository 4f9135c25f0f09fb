"""What makes a GPU fast: compiled models, memory formats, fused optimizers; and how much of it a run uses."""

import importlib.util
import time
from typing import Any

import torch
from torch import Tensor

from composer.algorithms import ChannelsLast
from composer.callbacks import SpeedMonitor
from composer.core import Callback
from composer.loggers import InMemoryLogger
from composer.optim import DecoupledAdamW, DecoupledSGDW
from gpu_cases import Skip
from gpu_cases.subjects import (
    Losses,
    make_batches,
    make_convolutional,
    make_gpt,
    make_images,
    make_network,
    make_sentences,
    make_trainer,
)


def compiled(device: str) -> str:
    """A compiled model trains to the weights of one that is not."""
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        raise Skip("torch.compile needs triton, which is not installed")
    config = {} if device == "cuda" else {"backend": "aot_eager"}
    plain, ours = make_network(), make_network()
    times_s = {}
    for network, settings in ((plain, {}), (ours, {"compile_config": config})):
        start = time.perf_counter()
        with make_trainer(network, make_batches(20), device, optimizers=_sgd(network), **settings) as trainer:
            trainer.fit()
        times_s[network] = time.perf_counter() - start
    # TF32 rounds to three digits, and the kernels are others.
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=1e-2, atol=1e-3)
    return f"same weights and names; {times_s[ours]:.0f} s with the compiling, {times_s[plain]:.1f} s without"


def channels_last(device: str) -> str:
    """Weights and activations of a convolutional network are in the other memory format, and its loss falls."""
    network, losses, formats = make_convolutional(), Losses(), list[bool]()
    network[0].register_forward_hook(lambda module, inputs, output: formats.append(_is_channels_last(output)))
    settings = {"algorithms": ChannelsLast(), "callbacks": losses, "precision": "amp_bf16"}
    with make_trainer(network, make_images(40), device, **settings) as trainer:
        trainer.fit()
    assert _is_channels_last(next(network.parameters())), "the weights are as they were"
    assert set(formats) == {True}, "the activations are as they were"
    first, last = losses.fall()
    return f"loss {first:.2f} to {last:.2f}"


def fused_adamw(device: str) -> str:
    """`DecoupledAdamW(fused=True)` takes the steps of its formula, computed in float64."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(1000, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(1000, generator=generator, dtype=torch.float64) for _ in range(10)]
    lr, weight_decay, betas, eps = 1e-2, 1e-3, (0.9, 0.95), 1e-8
    weight = start.clone().to(device).requires_grad_()
    optimizer = DecoupledAdamW([weight], lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, fused=True)
    expected, mean, square = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step, gradient in enumerate(gradients, start=1):
        weight.grad = gradient.to(device)
        optimizer.step()
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient**2
        denominator = (square / (1 - betas[1] ** step)).sqrt() + eps
        expected = expected * (1 - weight_decay) - lr * mean / (1 - betas[0] ** step) / denominator
    farthest = float((weight.detach().cpu() - expected).abs().max())
    assert farthest < 1e-10, f"off by {farthest:.1e}"
    return f"10 steps, off by {farthest:.0e} at most"


def fused_by_default(device: str) -> str:
    """Our optimizers take the fused kernel on a GPU, also with state whose strides are not those of the weights."""
    for make, options in ((DecoupledAdamW, {}), (DecoupledSGDW, {"momentum": 0.9})):
        ends = []
        for fused in (None, False):
            network = make_convolutional().to(memory_format=torch.channels_last)
            optimizer = make(network.parameters(), lr=1e-2, fused=fused, **options)
            network.to(device)
            assert optimizer._step_supports_amp_scaling == (device == "cuda" and fused is None)
            for step in range(4):
                generator = torch.Generator().manual_seed(step)
                for weight in network.parameters():  # contiguous
                    weight.grad = torch.randn(weight.shape, generator=generator).to(device)
                optimizer.step()
                saved = optimizer.state_dict()
                for entries in saved["state"].values():
                    entries.update({name: value.cpu().contiguous() for name, value in entries.items()})
                optimizer.load_state_dict(saved)
            ends.append([weight.detach().cpu() for weight in network.parameters()])
        torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)
    return "same weights as without"


def mfu(device: str) -> str:
    """`SpeedMonitor` logs a model FLOPs utilization between 0 and 1."""
    is_cuda = device == "cuda"
    sizes = {"d_model": 1024, "n_heads": 8, "n_layers": 8, "vocab_size": 8192, "max_seq_len": 1024} if is_cuda else {}
    length = sizes.get("max_seq_len", 64)
    model, memory = make_gpt(**sizes), InMemoryLogger()
    monitor = SpeedMonitor(window_size=10, gpu_flops_available=None if is_cuda else 1e12)
    settings = {"precision": "amp_bf16", "callbacks": [monitor, ReadsLoss()], "loggers": memory}
    with make_trainer(model, make_sentences(30, 8, length), device, **settings) as trainer:
        trainer.fit()
    if not monitor.gpu_flops_available:
        raise Skip(f"nobody told how much {torch.cuda.get_device_name()} can compute")
    _, utilization = memory.data["throughput/device/mfu"][-1]
    assert 0 < float(utilization) < 1, f"a utilization of {utilization}"
    return f"MFU {float(utilization):.1%}"


class ReadsLoss(Callback):
    """Waits for the device after each batch, so that the clock tells when it was done."""

    def batch_end(self, state: Any, logger: Any) -> None:
        """Read the loss."""
        state.loss.item()


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _sgd(network: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
