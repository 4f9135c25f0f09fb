"""The source of Python's standard library, byte by byte.

Nothing is downloaded. Every tenth module or package is held out as a whole. What differs between installations (tests,
installed packages) is left out, and so are files with characters beyond ASCII: each byte is one character.
"""

import os
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

VOCABULARY = 128
CONTEXT = 256
# As many windows as an evaluation reads. They lie spread over all of the held-out text.
NUM_HELD_OUT = 128

_LEFT_OUT = {"__pycache__", "idlelib", "lib2to3", "site-packages", "dist-packages", "test", "tests", "turtledemo"}


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of a text, none of which overlap; each byte is the label of the one before.

    Args:
        text: One byte for each entry.
        length: Of the windows.
    """

    def __init__(self, text: Tensor, length: int = CONTEXT) -> None:
        self.windows = text[: len(text) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one window as the model takes it."""
        window = self.windows[index].long()
        return {"input_ids": window, "labels": window}


@cache
def load_stdlib() -> tuple[Windows, Windows]:
    """Read everything.

    Returns:
        Windows to train on, about 35,000, and `NUM_HELD_OUT` windows of other modules.
    """
    train, held_out = bytearray(), bytearray()
    for number, paths in enumerate(find_modules().values()):
        for path in paths:
            (held_out if number % 10 == 9 else train).extend(_read(path))
    windows = Windows(torch.frombuffer(held_out, dtype=torch.uint8))
    windows.windows = windows.windows[:: max(1, len(windows) // NUM_HELD_OUT)][:NUM_HELD_OUT]
    return Windows(torch.frombuffer(train, dtype=torch.uint8)), windows


@cache
def find_modules() -> dict[str, list[Path]]:
    """Return the files of each module or package at the top of the standard library, in a settled order."""
    root = Path(os.__file__).parent
    modules: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not _LEFT_OUT.intersection(parts):
            modules.setdefault(parts[0].removesuffix(".py"), []).append(path)
    return dict(sorted(modules.items()))


def _read(path: Path) -> bytes:
    text = path.read_bytes()
    return text if text.isascii() else b""
