"""Random decisions about the residual blocks to keep in a forward pass."""

import hashlib

import torch
from torch import Tensor


class BlockDraws:
    """Decide for each block and forward pass whether the block is kept.

    Without a seed the decisions come from PyTorch's CPU generator, like dropout's: they differ between ranks,
    checkpoints restore them, and activation checkpointing repeats them. With a seed they are the same on all ranks, as
    a sharded model requires, whose ranks have to gather the weights of a block together.

    Args:
        seed: Seed shared by all ranks, or `None`.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self.num_draws = 0

    def keep(self, drop_rate: Tensor) -> bool:
        """Return false with a probability of `drop_rate`, a tensor on the CPU."""
        return bool(torch.rand((), generator=self._generator()) >= drop_rate)

    def _generator(self) -> torch.Generator | None:
        if self.seed is None:
            return None
        # A generator per draw, so that a checkpoint has to keep only the number of draws.
        digest = hashlib.blake2b(f"{self.seed}/StochasticDepth/{self.num_draws}".encode(), digest_size=8).digest()
        self.num_draws += 1
        return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
