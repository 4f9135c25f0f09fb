"""Which residual blocks are there in a forward pass."""

import hashlib

import torch
from torch import Tensor


class BlockDraws:
    """Decide for each block and forward pass whether the block is there.

    Without a seed the decisions come from PyTorch's generator on the CPU, as dropout's would: each rank has its own,
    checkpoints restore it, and activation checkpointing repeats them. With a seed they are the same on all ranks, as
    a sharded model needs it, whose ranks gather a block's weights together or not at all.

    Args:
        seed: The seed that all ranks share, or `None`.
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
        # A generator for each draw, so that the number of draws is all that a checkpoint must keep.
        digest = hashlib.blake2b(f"{self.seed}/StochasticDepth/{self.num_draws}".encode(), digest_size=8).digest()
        self.num_draws += 1
        return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
