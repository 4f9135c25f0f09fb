"""Mixed precision: losses fall, weights stay float32, and what overflows or is not a number does no harm."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer.core import Callback
from composer.models import ComposerModel
from composer.trainer.divergence import DivergenceError
from gpu_cases import Skip
from gpu_cases.subjects import Losses, make_batches, make_network, make_trainer

NUM_BATCHES = 60


def amp_bf16(device: str) -> str:
    """Train with bfloat16 activations."""
    if device == "cuda" and not torch.cuda.is_bf16_supported():
        raise Skip("this GPU has no bfloat16")
    losses, _ = _train(device, "amp_bf16", torch.bfloat16)
    return losses


def amp_fp16(device: str) -> str:
    """Train with float16 activations and a scaled loss."""
    losses, scaler = _train(device, "amp_fp16", torch.float16)
    assert scaler.is_enabled(), "the scaler does nothing"
    return f"{losses}, scale {scaler.get_scale():.0f}"


def fp16_overflow(device: str) -> str:
    """One batch's gradients overflow in float16: no step, half the scale, and training goes on."""
    network, watch = make_network(), Watch()
    calls = iter(range(NUM_BATCHES))

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets) * (1e6 if next(calls) == 5 else 1.0)

    model = ComposerModel.from_module(network, loss)
    with make_trainer(model, make_batches(12), device, precision="amp_fp16", callbacks=watch) as trainer:
        trainer.fit()
    moved = [not torch.equal(one, other) for one, other in zip(watch.weights, watch.weights[1:], strict=False)]
    assert moved == [number != 5 for number in range(len(moved))], f"which batches moved the weights: {moved}"
    assert watch.scales[6] == watch.scales[5] / 2, f"the scale went from {watch.scales[5]} to {watch.scales[6]}"
    return f"scale {watch.scales[5]:.0f} to {watch.scales[6]:.0f}, no step"


def fp16_divergence(device: str) -> str:
    """A batch with a NaN is named, and leaves no trace in the weights."""
    batches = make_batches(8)
    expected = make_network()
    with make_trainer(expected, batches[:5], device, precision="amp_fp16") as trainer:
        trainer.fit()
    batches[5][0][0, 0] = float("nan")
    return _diverge(make_network(), expected, batches, device, precision="amp_fp16")


def divergence_unwaited(device: str) -> str:
    """With a fused optimizer the host finds a NaN without ever waiting for the GPU."""
    batches = [(inputs.to(device), targets.to(device)) for inputs, targets in make_batches(8)]
    expected, network = make_network().to(device), make_network().to(device)
    with make_trainer(expected, batches[:5], device, optimizers=_fused(expected)) as trainer:
        trainer.fit()
    batches[5][0][0, 0] = float("nan")
    torch.cuda.set_sync_debug_mode("error")
    try:
        return _diverge(network, expected, batches, device, optimizers=_fused(network))
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Watch(Callback):
    """Keep the first layer's weights and the scale before each batch."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.scales: list[float] = []

    def batch_start(self, state: Any, logger: Any) -> None:
        """Keep them."""
        self.weights.append(next(state.model.parameters()).detach().clone())
        self.scales.append(state.scaler.get_scale())


def _train(device: str, precision: str, dtype: torch.dtype) -> tuple[str, Any]:
    network, losses, seen = make_network(), Losses(), set[torch.dtype]()
    network[0].register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    with make_trainer(network, make_batches(NUM_BATCHES), device, precision=precision, callbacks=losses) as trainer:
        trainer.fit()
        scaler = trainer.state.scaler
    assert seen == {dtype}, f"a layer's outputs were {seen}"
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}, "the weights were cast"
    first, last = losses.fall()
    return f"loss {first:.2f} to {last:.2f}", scaler


def _fused(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, fused=True)


def _diverge(network: nn.Module, expected: nn.Module, batches: list[Any], device: str, **settings: Any) -> str:
    trainer = make_trainer(network, batches, device, **settings)
    try:
        trainer.fit()
        named = None
    except DivergenceError as error:
        named = error.divergence.batch
    finally:
        torch.cuda.set_sync_debug_mode("default")
        trainer.close()
    assert named == 5, f"batch {named} was named, and 5 has the NaN"
    torch.testing.assert_close(list(network.parameters()), list(expected.parameters()), rtol=1e-5, atol=1e-7)
    return "batch 5 named, weights as after batch 4"
