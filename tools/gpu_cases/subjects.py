"""The small networks and batches that the cases train, always the same ones."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer import Trainer
from composer.core import Callback
from composer.models import ComposerGPT, ComposerModel
from composer_dist import Device

NUM_FEATURES, NUM_CLASSES, BATCH = 64, 10, 32
VOCABULARY, LENGTH = 128, 64

Batch = tuple[Tensor, Tensor]


class Losses(Callback):
    """Keep the loss of each batch, on its device until somebody asks."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def after_loss(self, state: Any, logger: Any) -> None:
        """Keep it."""
        self.losses.append(state.loss.detach())

    def fall(self) -> tuple[float, float]:
        """Return the mean of the first and of the last quarter, and raise if the loss has not fallen."""
        values = torch.stack(self.losses).float().cpu()
        quarter = len(values) // 4
        first, last = float(values[:quarter].mean()), float(values[-quarter:].mean())
        assert last < 0.9 * first, f"the loss did not fall: {first:.3f} at first, {last:.3f} at last"
        return first, last


def make_network(width: int = 128, dropout: float = 0.0) -> nn.Sequential:
    """Return a classifier of three layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, NUM_CLASSES),
    )


def make_batches(num_batches: int, batch_size: int = BATCH) -> list[Batch]:
    """Return batches whose classes can be learned: of 10 directions, the one that the inputs point to most."""
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(NUM_FEATURES, NUM_CLASSES, generator=generator)
    inputs = [torch.randn(batch_size, NUM_FEATURES, generator=generator) for _ in range(num_batches)]
    return [(each, (each @ directions).argmax(1)) for each in inputs]


def make_convolutional(width: int = 32) -> nn.Sequential:
    """Return a network for images with a stride, a pooling layer and norms, as the methods for images look for."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, NUM_CLASSES),
    )


def make_images(num_batches: int, batch_size: int = BATCH, side: int = 32) -> list[Batch]:
    """Return batches of images, each class of which is lighter in a place of its own."""
    generator = torch.Generator().manual_seed(1)
    batches: list[Batch] = []
    for _ in range(num_batches):
        labels = torch.randint(NUM_CLASSES, (batch_size,), generator=generator)
        images = torch.randn(batch_size, 3, side, side, generator=generator)
        columns = labels[:, None] * side // NUM_CLASSES + torch.arange(side // NUM_CLASSES)
        images[torch.arange(batch_size)[:, None], :, :, columns] += 2.0
        batches.append((images, labels))
    return batches


def make_gpt(**sizes: Any) -> ComposerGPT:
    """Return a GPT, of two layers unless it is told otherwise."""
    torch.manual_seed(0)
    small = {"d_model": 64, "n_heads": 2, "n_layers": 2, "vocab_size": VOCABULARY, "max_seq_len": LENGTH}
    return ComposerGPT({**small, **sizes})


def make_sentences(num_batches: int, batch_size: int = 8, length: int = LENGTH) -> list[dict[str, Tensor]]:
    """Return batches of tokens that count upwards from one drawn at random."""
    generator = torch.Generator().manual_seed(1)
    starts = [torch.randint(VOCABULARY, (batch_size, 1), generator=generator) for _ in range(num_batches)]
    tokens = [(start + torch.arange(length)) % VOCABULARY for start in starts]
    return [{"input_ids": each, "labels": each} for each in tokens]


def make_trainer(model: nn.Module, batches: list[Any], device: str | Device, **settings: Any) -> Trainer:
    """Return what trains a model for one epoch, in float32 unless it is told otherwise."""
    if not isinstance(model, ComposerModel):
        model = ComposerModel.from_module(model, F.cross_entropy)
    first = batches[0]
    size = len(first["input_ids"]) if isinstance(first, dict) else len(first[0])
    usual: dict[str, Any] = {
        "train_dataloader": batches,
        "max_duration": "1ep",
        "device_train_microbatch_size": size,
        "precision": "fp32",
        "progress_bar": False,
        "seed": 3,
    }
    if "optimizers" not in settings:
        usual["optimizers"] = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return Trainer(model=model, device="gpu" if device == "cuda" else device, **{**usual, **settings})
