"""The data and the network that `digits.yaml`, `glyphs.yaml` and `stdlib.yaml` name. Nothing is downloaded."""

import os
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset


def digits(split: Literal["train", "held_out"], seed: int = 17) -> Subset[tuple[torch.Tensor, ...]]:
    """Return 1,297 handwritten digits of 8x8 pixels to train on, or the other 500."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.as_tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed)).tolist()
    return Subset(TensorDataset(images, torch.as_tensor(labels)), order[:1297] if split == "train" else order[1297:])


def glyphs(split: Literal["train", "held_out"]) -> TensorDataset:
    """Return 2,976 letters and digits of 16 fonts to train on, or 744 of 6 other fonts."""
    from recipes.glyph_data import load_glyphs  # needs matplotlib

    train, held_out = load_glyphs()
    return train if split == "train" else held_out


def small_network(channels: int = 32, num_classes: int = 10) -> nn.Sequential:
    """Return two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * channels, num_classes),
    )


class StandardLibrary(Dataset[dict[str, torch.Tensor]]):
    """The source of the modules of Python's standard library, in windows of bytes; every tenth module is held out."""

    def __init__(self, split: Literal["train", "held_out"], window: int = 128) -> None:
        paths = sorted(Path(os.__file__).parent.glob("*.py"))
        chosen = [path for number, path in enumerate(paths) if (number % 10 == 0) == (split == "held_out")]
        source = b"\n".join(path.read_bytes() for path in chosen)
        count = len(source) // window
        self.windows = torch.from_numpy(np.frombuffer(source, np.uint8)[: count * window].reshape(count, window).copy())

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one window."""
        tokens = self.windows[index].long()
        return {"input_ids": tokens, "labels": tokens}
