"""Whether the ranks that hold one tensor together are given the same batches, without which they compute nonsense."""

import warnings
import zlib
from typing import Any

import torch
import torch.distributed as tdist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves  # its public face, `optree`, is another package

from composer_dist import dist

__all__ = ["FirstBatch"]


class FirstBatch:
    """Compares the first batch of the ranks of a mesh, once.

    Args:
        mesh: The ranks that hold one tensor together.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._ranks = tdist.get_process_group_ranks(mesh.get_group())
        self._seen: str | None = None
        self._is_compared = False

    def see(self, batch: Any) -> None:
        """Remember a batch, if it is the first. It waits for the batch's device that once."""
        if self._seen is None and not self._is_compared:
            self._seen = _fingerprint(batch)

    def forget(self) -> None:
        """Take the next batch for the first, unless one was compared."""
        self._seen = None

    def compare(self) -> None:
        """Warn if the others saw another batch. Every rank must call this once it has seen one."""
        if self._is_compared:
            return
        self._is_compared = True
        seen, self._seen = dist.all_gather_object(self._seen), None
        if len({seen[rank] for rank in self._ranks}) > 1:
            degree, world_size = len(self._ranks), len(seen)
            warnings.warn(
                f"The ranks {self._ranks} hold tensors together, and their first batches differ, so that what they "
                f"compute belongs to neither. Give the ranks of each {degree} the same samples: dist.get_sampler("
                f"dataset, num_replicas={world_size // degree}, rank=dist.get_global_rank() // {degree}).",
                UserWarning,
                stacklevel=2,
            )


def _fingerprint(batch: Any) -> str:
    """Return what tells a batch from another one: a checksum of its tensors."""
    checksum = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        checksum = zlib.crc32(leaf if isinstance(leaf, bytes) else repr(leaf).encode(), checksum)
    return f"{checksum:08x}"
