"""Device meshes of a sharded model."""

from typing import Any

import torch
import torch.distributed as tdist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer_dist import dist
from composer_fsdp.checks import HYBRID_STRATEGIES
from composer_fsdp.config import AXES
from composer_fsdp.groups import GroupCache, check_grids, is_pair
from composer_fsdp.plan import ShardingPlan

# Default of the hybrid strategies: shard within a node, where links are fast, and replicate across nodes.
_BY_NODES = ("node", "local_rank_across_nodes")


class Meshes:
    """Device meshes of one sharded model.

    Attributes:
        whole: The mesh of all axes; `None` if the plan uses process groups.
        data: The data-parallel mesh: one axis that shards, or two, of which the first replicates.
        tensor: The tensor-parallel mesh, or `None`.
    """

    def __init__(self, plan: ShardingPlan, device_type: str, whole: DeviceMesh | None = None) -> None:
        self.device_type = device_type
        self._groups = GroupCache()
        self._of_groups: dict[tuple[Any, ...], DeviceMesh] = {}
        self.whole: DeviceMesh | None = plan.device_mesh if plan.device_mesh is not None else whole
        if self.whole is None and plan.degrees:
            self.whole = init_device_mesh(device_type, tuple(plan.degrees.values()), mesh_dim_names=tuple(plan.degrees))
        self.tensor = plan.tp_device_mesh
        if self.tensor is None and plan.tensor_parallel_degree > 1:
            assert self.whole is not None
            self.tensor = self.whole[AXES[2]]
        self.data = self._data_mesh(plan)

    def _data_mesh(self, plan: ShardingPlan) -> DeviceMesh:
        if plan.sharding_strategy == "NO_SHARD":
            group = plan.process_group
            ranks = list(range(dist.get_world_size())) if group is None else self._ranks(self._groups.get(group))
            return self._from_ranks([[rank] for rank in ranks], "self", group)
        if plan.device_mesh is not None:
            return plan.device_mesh
        if self.whole is None:
            group = plan.process_group
            if group is None:
                return self.of_groups(*_BY_NODES)
            return self.of_groups(*group) if is_pair(group) else self.of_groups(group)
        if self.whole.mesh_dim_names is None or AXES[1] not in self.whole.mesh_dim_names:
            return self.whole  # a user's mesh with other axis names
        return self.whole[AXES[:2]] if AXES[0] in self.whole.mesh_dim_names else self.whole[AXES[1]]

    def of_strategy(self, strategy: str | None) -> DeviceMesh:
        """Return the mesh of a unit with its own sharding strategy. Every rank must call this."""
        if strategy == "NO_SHARD":
            # A shard axis of size 1, since FSDP2 has no strategy without sharding.
            return self._from_ranks([[rank] for rank in range(dist.get_world_size())], "self", None)
        if strategy in HYBRID_STRATEGIES and self.data.ndim == 1:
            return self.of_groups(*_BY_NODES)
        return self.data

    def of_groups(self, shard: Any, replicate: Any = None) -> DeviceMesh:
        """Return the mesh of a shard group and an optional replicate group. Every rank must call this."""
        shard_group = self._groups.get(shard)
        if replicate is None:
            key: tuple[Any, ...] = (shard_group,)
            if key not in self._of_groups:
                self._of_groups[key] = DeviceMesh.from_group(shard_group, self.device_type)
            return self._of_groups[key]
        replicate_group = self._groups.get(replicate)
        # Each rank knows only its own groups, but `DeviceMesh.from_group` needs all ranks of the mesh.
        of_ranks = dist.all_gather_object((self._ranks(shard_group), self._ranks(replicate_group)))
        check_grids((shard, replicate), [ranks for ranks, _ in of_ranks], [ranks for _, ranks in of_ranks])
        rows = [of_ranks[rank][0] for rank in self._ranks(replicate_group)]
        return self._from_ranks(rows, shard_group, replicate_group)

    def across(self, shard: Any) -> Any:
        """Return the ranks at this rank's position in all groups of a kind. Every rank must call this."""
        own = self._ranks(self._groups.get(shard))
        place = own.index(dist.get_global_rank())
        everybody = dist.all_gather_object(own)
        return sorted({members[place] for members in everybody})

    def _from_ranks(self, rows: list[list[int]], shard: Any, replicate: Any) -> DeviceMesh:
        # Creating a group is a collective, so the order must be the same on every rank.
        shard_group = self._groups.get(shard)
        if replicate is None:
            replicate = list(range(dist.get_world_size()))
        replicate_group = self._groups.get(replicate)
        key = (shard_group, replicate_group)
        if key not in self._of_groups:
            self._of_groups[key] = DeviceMesh.from_group(
                [replicate_group, shard_group],
                self.device_type,
                mesh=torch.tensor(rows, dtype=torch.int),
                mesh_dim_names=AXES[:2],
            )
        return self._of_groups[key]

    @staticmethod
    def _ranks(group: tdist.ProcessGroup) -> list[int]:
        return sorted(tdist.get_process_group_ranks(group))
