"""A run of any number of ranks, in one process that talks to nobody: sizes are right in it, values are not."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as tdist
from torch.distributed.device_mesh import DeviceMesh

from composer_dist import dist
from composer_fsdp.degrees import AXES
from composer_fsdp.groups import size_of_group
from composer_fsdp.meshes import Meshes

__all__ = ["FakeMeshes", "fake_world"]

_RANKS_OF_A_NODE = 8


@contextmanager
def fake_world(world_size: int, local_world_size: int | None = None) -> Iterator[None]:
    """Make this process rank 0 of a run of its own imagination. Its collectives return at once, whatever they give.

    The environment says so too, inside.

    Args:
        world_size: How many ranks there are.
        local_world_size: How many of them each node has. At most 8 when `None`.

    Raises:
        ValueError: If there are no such numbers of ranks.
        RuntimeError: If this process has a process group already.
    """
    local = min(world_size, _RANKS_OF_A_NODE) if local_world_size is None else local_world_size
    for name, number in (("world_size", world_size), ("local_world_size", local)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name}={number!r} is not a number of ranks: it has to be 1 or more.")
    if world_size % local:
        raise ValueError(
            f"local_world_size={local} does not divide world_size={world_size}, so that the nodes would not have "
            f"equally many ranks. Give the number of ranks of each node."
        )
    if tdist.is_initialized():
        raise RuntimeError(
            f"this process is rank {tdist.get_rank()} of a real run, and cannot play one of {world_size} ranks at the "
            f"same time. Ask in a process of its own, such as by the command composer-fsdp."
        )
    variables = {"RANK": 0, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local, "NODE_RANK": 0}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        # Torch's own backend for this, which gives every rank what rank 0 has.
        tdist.init_process_group("fake", rank=0, world_size=world_size)
        try:
            yield
        finally:
            tdist.destroy_process_group()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class FakeMeshes(Meshes):
    """The meshes of a sharded model in a fake world, where no rank can ask the others for the groups they are in."""

    def of_groups(self, shard: Any, replicate: Any = None) -> DeviceMesh:
        """Return a mesh of the same shape as that of the groups."""
        shape = [_size(group) for group in (replicate, shard) if group is not None]
        key = tuple(shape)
        if key not in self._of_groups:
            ranks = torch.arange(shape[0] * shape[-1] if len(shape) == 2 else shape[0]).view(shape)
            names = AXES[:2] if len(shape) == 2 else AXES[1:2]
            self._of_groups[key] = DeviceMesh(self.device_type, ranks, mesh_dim_names=names)
        return self._of_groups[key]

    def across(self, shard: Any) -> Any:
        """Return as many ranks as there are groups of a kind."""
        return list(range(dist.get_world_size() // _size(shard)))


def _size(group: Any) -> int:
    return size_of_group(group, dist.get_world_size(), dist.get_local_world_size())
