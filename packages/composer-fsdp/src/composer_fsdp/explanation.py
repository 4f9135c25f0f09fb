"""What a configuration makes of a model: its units, with meshes, formats and sizes."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from composer_dist import Precision
from composer_fsdp.activation import chosen_for_checkpointing
from composer_fsdp.byte_sizes import format_bytes
from composer_fsdp.choice import units_of
from composer_fsdp.config import FSDP2Config, FSDPConfig, ParallelismConfig
from composer_fsdp.fake_world import FakeMeshes, fake_world
from composer_fsdp.plan import ShardingPlan, make_plan
from composer_fsdp.rehearsal import is_composer_model
from composer_fsdp.shardable import left_whole
from composer_fsdp.sharding import Sharder
from composer_fsdp.wrap_rules import Unit

__all__ = ["Explanation", "UnitSizes", "explain"]


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """A module that is sharded as one.

    Attributes:
        name: In the model; empty for the model itself.
        kind: The name of its class.
        depth: How many units it is in.
        parameters: How many numbers it has, without those of units inside it.
        shard_bytes: How much of them rank 0 keeps, which has the most.
        gathered_bytes: How much they take while they are gathered.
        mesh: Over how many ranks they are replicated and sharded, by axis.
        param_dtype: In what they compute.
        reduce_dtype: In what their gradients are averaged.
        freed_after_forward: Whether they are gathered anew for the backward pass; a number of ranks over which they
            stay sharded in between.
        checkpointed: Whether activations are computed again, in the unit or in a part of it.
        options: The settings of this unit alone.
    """

    name: str
    kind: str
    depth: int
    parameters: int
    shard_bytes: int
    gathered_bytes: int
    mesh: Mapping[str, int]
    param_dtype: str
    reduce_dtype: str
    freed_after_forward: bool | int
    checkpointed: bool
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a configuration makes of a model. As a string it is a tree.

    Attributes:
        world_size: Over how many ranks.
        units: As a model lists them, each before those inside it.
        whole_parameters: How many numbers every rank has whole.
        settings: As `ShardingPlan.to_dict` gives them.
        description: The settings, a line for each.
    """

    world_size: int
    units: Sequence[UnitSizes]
    whole_parameters: int
    settings: Mapping[str, Any]
    description: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as values that JSON knows."""
        units = [dataclasses.asdict(unit) | {"options": _plain(unit.options)} for unit in self.units]
        return {
            "world_size": self.world_size,
            "units": units,
            "whole_parameters": self.whole_parameters,
            "settings": _plain(self.settings),
        }

    def __str__(self) -> str:
        lines = [_line(unit) for unit in self.units]
        if self.whole_parameters:
            lines.append(f"whole on every rank: {self.whole_parameters:,} parameters")
        kept = sum(unit.shard_bytes for unit in self.units)
        lines.append(f"{len(self.units)} units over {self.world_size} ranks; rank 0 keeps {format_bytes(kept)} of them")
        return "\n".join([*lines, self.description])


def explain(
    model: nn.Module,
    config: ShardingPlan | ParallelismConfig | FSDPConfig | FSDP2Config | None = None,
    *,
    world_size: int = 8,
    local_world_size: int | None = None,
    precision: str | Precision | torch.dtype = "fp32",
) -> Explanation:
    """Say which modules of a model are sharded as one, over which ranks, in which formats. Nothing is changed.

    Args:
        model: A ComposerModel, whose children are sharded, or any other module, which is sharded itself. Its tensors
            may be on the meta device.
        config: The settings; those of an `FSDPConfig()` when `None`.
        world_size: Over how many ranks.
        local_world_size: How many of them each node has; at most 8 when `None`.
        precision: In which the run computes.

    Raises:
        ValueError, KeyError, TypeError: If model and settings do not go together.
        RuntimeError: If this process is a rank of a run.

    Example:
        >>> class Net(nn.Sequential):
        ...     def fsdp_wrap_fn(self, module):
        ...         return isinstance(module, nn.Linear)
        >>> explanation = explain(Net(nn.Linear(4, 6), nn.LayerNorm(6)), FSDPConfig(), world_size=4)
        >>> [(unit.name, unit.parameters, unit.shard_bytes) for unit in explanation.units]
        [('', 12, 16), ('0', 30, 40)]
    """
    with fake_world(world_size, local_world_size):
        plan = plan_of(config, precision, world_size)
        units = units_of(model, plan, wraps_itself=not is_composer_model(model))
        checkpointed = set(chosen_for_checkpointing(model)) if plan.activation_checkpointing else set[nn.Module]()
        sharder = Sharder(plan, FakeMeshes(plan, "cpu"), torch.device("cpu"))
        kept_whole = left_whole(model, plan)
        taken = set(map(id, kept_whole))
        rows: dict[str, UnitSizes] = {}
        for unit in units:
            inside = (u for u in units if u is not unit and _is_inside(unit.name, u.name))
            rows[unit.name] = _measure(unit, sum(1 for _ in inside), sharder, taken, checkpointed)
    whole = sum(p.numel() for p in model.parameters() if p in kept_whole or id(p) not in taken)
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return Explanation(
        world_size,
        [rows[name] for name in sorted(rows, key=lambda name: order.get(name, 0))],
        whole,
        plan.to_dict(),
        plan.describe(),
    )


def plan_of(
    config: ShardingPlan | ParallelismConfig | FSDPConfig | FSDP2Config | None,
    precision: str | Precision | torch.dtype,
    world_size: int,
) -> ShardingPlan:
    """Return a plan from any form of settings."""
    if isinstance(config, ShardingPlan):
        return config
    return make_plan(FSDPConfig() if config is None else config, precision=precision, world_size=world_size)


def _measure(unit: Unit, depth: int, sharder: Sharder, taken: set[int], checkpointed: set[nn.Module]) -> UnitSizes:
    own = {id(p): p for m in (unit.module, *unit.partners) for p in m.parameters() if id(p) not in taken}
    taken.update(own)
    mesh, dtypes, reshard = sharder.mesh_of(unit), sharder.dtypes_of(unit), sharder.reshard_of(unit)
    axes = mesh.mesh_dim_names or (("replicate", "shard") if mesh.ndim == 2 else ("shard",))
    sizes = dict(zip(axes, mesh.mesh.shape, strict=True))
    shards = mesh.size(mesh.ndim - 1)
    return UnitSizes(
        name=unit.name,
        kind=type(unit.module).__name__,
        depth=depth,
        parameters=sum(p.numel() for p in own.values()),
        shard_bytes=sum(_rows_of_rank_zero(p, shards) * p.itemsize for p in own.values()),
        gathered_bytes=sum(_rows_of_rank_zero(p, shards) * shards for p in own.values()) * dtypes.param.itemsize,
        mesh=sizes,
        param_dtype=str(dtypes.param).removeprefix("torch."),
        reduce_dtype=str(dtypes.reduce).removeprefix("torch."),
        # Torch keeps the outermost weights, which the backward pass needs first.
        freed_after_forward=False if reshard is None else reshard,
        checkpointed=any(module in checkpointed for module in unit.module.modules()),
        options=unit.options,
    )


def _rows_of_rank_zero(parameter: nn.Parameter, shards: int) -> int:
    """Return how many numbers rank 0 keeps of a tensor that is cut along its first dim, as evenly as its rows go."""
    rows = parameter.shape[0]
    return -(-rows // shards) * (parameter.numel() // rows)


def _is_inside(name: str, outer: str) -> bool:
    return name.startswith(f"{outer}.") or (outer == "" and name != "")


def _line(unit: UnitSizes) -> str:
    freed = "freed after forward"
    if unit.freed_after_forward is False:
        freed = "kept until backward"
    elif unit.freed_after_forward is not True:
        freed = f"kept over {unit.freed_after_forward} ranks until backward"
    mesh = " x ".join(f"{axis}={size}" for axis, size in unit.mesh.items())
    parts = [
        f"{unit.parameters:,} parameters, {format_bytes(unit.shard_bytes)} a rank",
        f"{format_bytes(unit.gathered_bytes)} gathered in {unit.param_dtype}, {freed}",
        f"reduced in {unit.reduce_dtype}",
        f"mesh {mesh}",
    ]
    parts += ["activations computed again"] if unit.checkpointed else []
    parts += [f"its own settings {dict(unit.options)}"] if unit.options else []
    return f"{'  ' * unit.depth}{unit.name or '(the model)'} ({unit.kind}): {'; '.join(parts)}"


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)
        for key, value in values.items()
    }
