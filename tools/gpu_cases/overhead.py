"""What the Trainer adds to a step on the device, beside a loop written by hand that takes turns with it."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer.models import ComposerModel
from composer_models import GPTConfig
from composer_models.gpt import GPT
from gpu_cases.subjects import Batch, make_batches, make_network, make_trainer

NUM_TURNS = 12
NOT_COUNTED = 2


def tiny(device: str) -> str:
    """Steps so small that only the host takes time."""
    return _compare(make_network, make_batches(100), device, torch.float32)


def gpt(device: str) -> str:
    """Steps of a GPT with 26 million parameters in bfloat16; on a CPU of a tiny one."""
    width, layers, heads, length = (512, 8, 8, 512) if device == "cuda" else (32, 2, 2, 16)
    config = {"d_model": width, "n_layers": layers, "n_heads": heads, "vocab_size": 512, "max_seq_len": length}
    config |= {"emb_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = torch.randint(512, (20, 16, length + 1), generator=torch.Generator().manual_seed(1))
    batches = [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return GPT(GPTConfig.from_any(config))

    return _compare(make, batches, device, torch.bfloat16)


class TakesTurns:
    """Batches for the Trainer; before each turn of its reader, the loop by hand has one.

    Args:
        batches: Those of a turn.
        by_hand: A turn of the loop by hand.
        after_first: Called when both have had one turn.
        device: Where they train.

    Attributes:
        times_s: How long the turns of the loop by hand took, and those of the reader.
    """

    def __init__(
        self, batches: list[Batch], by_hand: Callable[[], None], after_first: Callable[[], None], device: str
    ) -> None:
        self.times_s: tuple[list[float], list[float]] = [], []
        self._after_first = after_first
        self._batches, self._by_hand, self._device = batches, by_hand, device

    def __len__(self) -> int:
        return NUM_TURNS * len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of all turns."""
        for _ in range(NUM_TURNS):
            start_s = self._now_s()
            self._by_hand()
            middle_s = self._now_s()
            yield from self._batches
            self.times_s[0].append(middle_s - start_s)
            self.times_s[1].append(self._now_s() - middle_s)
            if len(self.times_s[1]) == 1:
                self._after_first()

    def _now_s(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _compare(make: Callable[[], nn.Module], batches: list[Batch], device: str, dtype: torch.dtype) -> str:
    """Train both ways, raise if the weights come out different, and return the time of a step of each."""
    if device == "cuda":
        batches = [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in batches]
    network, ours = make().to(device), make()

    def check() -> None:
        # Attention adds up in another order each time, which Adam magnifies, so the weights do not agree to a digit.
        start = nn.utils.parameters_to_vector(make().to(device).parameters()).detach()
        by_hand, by_trainer = (nn.utils.parameters_to_vector(each.parameters()).detach() for each in (network, ours))
        apart = float((by_trainer - by_hand).norm() / (by_hand - start).norm())
        assert apart < 0.5, f"the weights are {apart:.2f} of their way apart"

    turns = TakesTurns(batches, lambda: _train(network, optimizer, batches, device, dtype), check, device)
    optimizer = _adamw(network)
    settings: dict[str, Any] = {"precision": "amp_bf16" if dtype == torch.bfloat16 else "fp32"}
    model = ComposerModel.from_module(ours, _loss)
    with make_trainer(model, batches, device, train_dataloader=turns, optimizers=_adamw(ours), **settings) as trainer:
        trainer.fit()
    pairs = list(zip(*turns.times_s, strict=True))[NOT_COUNTED:]
    ratio = statistics.median(trainer_s / hand_s for hand_s, trainer_s in pairs)
    hand_ms, trainer_ms = (1e3 * statistics.median(times) / len(batches) for times in zip(*pairs, strict=True))
    return f"a step {trainer_ms:.2f} ms, by hand {hand_ms:.2f} ms, ratio {ratio:.2f}"


def _train(
    network: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch], device: str, dtype: torch.dtype
) -> None:
    """Train on the batches in the shortest loop."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = _loss(network(inputs.to(device, non_blocking=True)), targets.to(device, non_blocking=True))
        loss.backward()
        optimizer.step()


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _adamw(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
