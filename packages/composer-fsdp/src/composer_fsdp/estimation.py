"""Estimates of the memory and communication of a training step."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves  # torch has no public name for it

from composer_dist import Precision
from composer_fsdp.activation import chosen_for_checkpointing
from composer_fsdp.config import FSDP2Config, FSDPConfig, ParallelismConfig, format_bytes
from composer_fsdp.fake_run import FakeMeshes, Workload, fake_world, is_composer_model, simulate_steps
from composer_fsdp.memory_log import Moment
from composer_fsdp.mixed_precision import resolve_dtypes
from composer_fsdp.plan import ShardingPlan, make_plan
from composer_fsdp.sharding import Sharder
from composer_fsdp.unit_selection import left_whole, units_of
from composer_fsdp.wrap_rules import Unit, choose_units

__all__ = ["Estimate", "Suggestion", "estimate", "Explanation", "UnitSizes", "explain"]


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Suggestion that reduces memory use.

    Attributes:
        change: The change to make.
        peak_bytes: The resulting peak in bytes; `None` if it depends on how the change is made.
    """

    change: str
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated memory and communication of one rank; its string form is a readable report.

    Attributes:
        world_size: The number of ranks.
        peak: The device memory at its peak, by kind: `parameters`, `gradients` and `optimizer state` are the shards,
            `gathered` is whole weights and their gradients, `communication` is the buffers of collectives, and
            `activations` is everything else allocated by forward, backward and optimizer.
        host: The host memory at its peak, if weights or activations are offloaded.
        calls: The number of collectives per step, by name.
        sent: The bytes that this rank sends per step, by collective, assuming ring algorithms.
        gpu_memory: The memory of a device in bytes, if given.
        suggestions: Changes that reduce the peak, if it exceeds `gpu_memory`.
    """

    world_size: int
    peak: Moment
    host: Moment
    calls: Mapping[str, int]
    sent: Mapping[str, int]
    gpu_memory: int | None = None
    suggestions: Sequence[Suggestion] = ()

    @property
    def fits(self) -> bool:
        """Return whether the peak fits in `gpu_memory`; true if that is not given."""
        return self.gpu_memory is None or self.peak.bytes <= self.gpu_memory

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as JSON-serializable values, with memory in bytes."""
        return dataclasses.asdict(self) | {"fits": self.fits}

    def __str__(self) -> str:
        there = "" if self.gpu_memory is None else f" of {format_bytes(self.gpu_memory)}"
        lines = [f"needs {format_bytes(self.peak.bytes)}{there} at the peak, in {self.peak.place}"]
        lines += _table(self.peak)
        if self.host.bytes:
            lines += [f"needs {format_bytes(self.host.bytes)} of the host at its peak", *_table(self.host)]
        calls = ", ".join(
            f"{format_bytes(self.sent[name])} in {number} {name}" for name, number in sorted(self.calls.items())
        )
        lines.append(f"each step, a rank sends {calls}" if calls else "nothing is sent")
        if not self.fits:
            assert self.gpu_memory is not None
            lines.append(f"does not fit: {format_bytes(self.peak.bytes - self.gpu_memory)} too much")
            for suggestion in self.suggestions:
                needed = suggestion.peak_bytes
                verdict = "fits" if needed is not None and needed <= self.gpu_memory else "still too much"
                lines.append(
                    f"  {suggestion.change}" + ("" if needed is None else f": {format_bytes(needed)}, {verdict}")
                )
        return "\n".join(lines)


def estimate(
    model: nn.Module,
    config: ShardingPlan | ParallelismConfig | FSDPConfig | FSDP2Config | None,
    work: Workload,
    *,
    world_size: int = 8,
    local_world_size: int | None = None,
    precision: str | Precision | torch.dtype = "fp32",
    gpu_memory: int | None = None,
) -> Estimate:
    """Estimate the memory and communication of training steps of a sharded model on rank 0.

    A copy of the model made of fake tensors is sharded as in a real run and trained for two steps in a simulated
    world. No memory of the model's size is allocated. Only tensors are counted: allocator fragmentation, the driver
    context and library buffers come on top. The kernels are those of a CPU, which may save slightly different tensors
    than those of a GPU, such as dropout masks.

    Args:
        model: See `explain`. A model with a `loss` is trained under autocast, as in a Trainer, any other without.
        config: The settings; `None` means `FSDPConfig()`.
        work: The work of one rank in a step.
        world_size: The number of ranks.
        local_world_size: The number of ranks per node; at most 8 when `None`.
        precision: The precision of the run.
        gpu_memory: The memory of a device in bytes. If the peak exceeds it, alternatives are estimated too.

    Raises:
        ValueError, KeyError, TypeError: If model, settings and work are incompatible.
        RuntimeError: If this process is a rank of a distributed run, the model reads tensor values, or its training
            step fails.

    Example:
        >>> model = nn.Linear(256, 256, bias=False, device="meta")
        >>> work = Workload(torch.zeros((1, 256), device="meta"), optimizer=torch.optim.SGD, on_gpu=False)
        >>> needed = estimate(model, FSDPConfig(), work, world_size=4)
        >>> needed.peak.kinds["parameters"] == 256 * 256 * 4 // 4
        True
    """
    with fake_world(world_size, local_world_size):
        plan = plan_of(config, precision, world_size)
        if not plan.auto_wrap or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise ValueError(
                "a parameter is a DTensor, or auto_wrap=False says that the model is sharded already, so that there is "
                "nothing to estimate. Pass the model before it is sharded, without auto_wrap=False."
            )
        log = simulate_steps(model, plan, work)
        peak = log.peak()
        suggestions: list[Suggestion] = []
        if gpu_memory is not None and peak.bytes > gpu_memory:
            # Suggestions without an estimate come last.
            suggestions = sorted(_suggestions(model, plan, work, peak), key=lambda s: s.peak_bytes or peak.bytes)
    return Estimate(world_size, peak, log.peak(on_host=True), dict(log.calls), dict(log.sent), gpu_memory, suggestions)


def _suggestions(model: nn.Module, plan: ShardingPlan, work: Workload, peak: Moment) -> Iterator[Suggestion]:
    for change, other_plan, other_work in _candidates(model, plan, work):
        # Not every candidate helps: another kind of memory may dominate the peak.
        needed = simulate_steps(model, other_plan, other_work).peak().bytes
        if needed < peak.bytes:
            yield Suggestion(change, needed)
    if not plan.activation_checkpointing and not chosen_for_checkpointing(model):
        yield Suggestion("choose modules by activation_checkpointing_fn and set activation_checkpointing=True")
    units = choose_units(model, plan, wraps_itself=not is_composer_model(model))
    if all(unit.is_root for unit in units):
        yield Suggestion("wrap parts of the model by fsdp_wrap_fn, so that it is not gathered as a whole")


def _candidates(model: nn.Module, plan: ShardingPlan, work: Workload) -> Iterator[tuple[str, ShardingPlan, Workload]]:
    if not plan.activation_checkpointing and chosen_for_checkpointing(model):
        yield "activation_checkpointing=True", replace(plan, activation_checkpointing=True), work
    leaves = tree_leaves(work.batch)
    size = work.batch_size or next(x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.ndim)
    if size > 1:
        half = replace(work, batch_size=size // 2)
        yield f"microbatches of {size // 2} examples in place of {size}", plan, half
    if plan.sharding_strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
        name = "FULL_SHARD" if plan.sharding_strategy == "SHARD_GRAD_OP" else "HYBRID_SHARD"
        other = replace(plan, sharding_strategy=name, reshard_after_forward=True)
        yield f"sharding_strategy={name!r}", other, work
    world_size = torch.distributed.get_world_size()
    if plan.tensor_parallel_degree == 1 and (plan.replicates or plan.sharding_strategy == "NO_SHARD"):
        everywhere = replace(
            plan,
            sharding_strategy="FULL_SHARD",
            reshard_after_forward=True,
            degrees={"data_parallel_shard": world_size},
            process_group=None,
            device_mesh=None,  # a given mesh would take precedence over the degrees
        )
        yield "sharding_strategy='FULL_SHARD' over all ranks", everywhere, work
    # With 'FULL' the precision of the run has no effect on weights and gradients.
    if plan.precision == "fp32" and plan.mixed_precision != "FULL":
        dtypes = resolve_dtypes(plan.mixed_precision, "amp_bf16")
        yield "precision='amp_bf16'", replace(plan, precision="amp_bf16", dtypes=dtypes), work
    if not plan.cpu_offload:
        yield "cpu_offload=True", replace(plan, cpu_offload=True), work


def _table(moment: Moment) -> list[str]:
    rows = sorted(moment.kinds.items(), key=lambda row: -row[1])
    return [f"  {kind:<16}{format_bytes(size):>12}" for kind, size in rows]


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Sizes of a module that is sharded as one unit.

    Attributes:
        name: The module's name; empty for the model itself.
        kind: The class name.
        depth: The number of units that contain this one.
        parameters: The number of parameter elements, excluding nested units.
        shard_bytes: The size of the shard on rank 0, which is the largest.
        gathered_bytes: The size of the gathered weights.
        mesh: The number of ranks along each mesh axis.
        param_dtype: The dtype of computation.
        reduce_dtype: The dtype of gradient reduction.
        freed_after_forward: Whether the weights are freed after forward and gathered again for backward, or the number
            of ranks over which they stay sharded in between.
        checkpointed: Whether the unit or a part of it uses activation checkpointing.
        options: The settings that apply to this unit only.
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
    """Description of how a model is sharded; its string form is a tree.

    Attributes:
        world_size: The number of ranks.
        units: The units in model order, each before its nested units.
        whole_parameters: The number of parameter elements that are not sharded.
        settings: The result of `ShardingPlan.to_dict`.
        description: The settings, one per line.
    """

    world_size: int
    units: Sequence[UnitSizes]
    whole_parameters: int
    settings: Mapping[str, Any]
    description: str

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as JSON-serializable values."""
        units = [dataclasses.asdict(unit) | {"options": _plain(unit.options)} for unit in self.units]
        return {
            "world_size": self.world_size,
            "units": units,
            "whole_parameters": self.whole_parameters,
            "settings": _plain(self.settings),
        }

    def __str__(self) -> str:
        # The blocks of a model differ only in their names.
        alike = itertools.groupby(self.units, lambda unit: dataclasses.replace(unit, name=""))
        lines = [_line(list(units)) for _, units in alike]
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
    """Describe the units of a sharded model, their meshes and their dtypes, without changing the model.

    Args:
        model: A ComposerModel, whose children are sharded, or any other module, which is sharded itself. Its tensors
            may be on the meta device.
        config: The settings; `None` means `FSDPConfig()`.
        world_size: The number of ranks.
        local_world_size: The number of ranks per node; at most 8 when `None`.
        precision: The precision of the run.

    Raises:
        ValueError, KeyError, TypeError: If model and settings are incompatible.
        RuntimeError: If this process is a rank of a distributed run.

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
            depth = sum(unit.name.startswith(f"{u.name}." if u.name else "") for u in units if u is not unit)
            rows[unit.name] = _measure(unit, depth, sharder, taken, checkpointed)
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
    """Return the sharding plan for settings of any supported type."""
    if isinstance(config, ShardingPlan):
        return config
    return make_plan(FSDPConfig() if config is None else config, precision=precision, world_size=world_size)


def _measure(unit: Unit, depth: int, sharder: Sharder, taken: set[int], checkpointed: set[nn.Module]) -> UnitSizes:
    own = {id(p): p for m in (unit.module, *unit.partners) for p in m.parameters() if id(p) not in taken}
    taken.update(own)  # nested units come first, so the remaining parameters belong to the outer unit
    mesh, dtypes, reshard = sharder.mesh_of(unit), sharder.dtypes_of(unit), sharder.reshard_of(unit)
    axes = mesh.mesh_dim_names or (("replicate", "shard") if mesh.ndim == 2 else ("shard",))
    sizes = dict(zip(axes, mesh.mesh.shape, strict=True))
    shards = mesh.size(mesh.ndim - 1)  # the last axis shards; an axis before it replicates
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
        # PyTorch keeps the root's weights by default, since the backward pass needs them first.
        freed_after_forward=False if reshard is None else reshard,
        checkpointed=any(module in checkpointed for module in unit.module.modules()),
        options=unit.options,
    )


def _rows_of_rank_zero(parameter: nn.Parameter, shards: int) -> int:
    """Return the number of elements on rank 0 of a tensor sharded along dim 0."""
    rows = parameter.shape[0]  # never split
    # FSDP2 rounds up, so that rank 0 has the largest shard and the last ranks may have less.
    return -(-rows // shards) * (parameter.numel() // rows)


def _line(units: Sequence[UnitSizes]) -> str:
    """Describe consecutive units that differ only in their names."""
    unit, which = units[0], f"{units[0].name or '(the model)'} ({units[0].kind})"
    if len(units) > 1:
        which = f"{unit.name} to {units[-1].name} ({len(units)} x {unit.kind}), each"
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
    return f"{'  ' * unit.depth}{which}: {'; '.join(parts)}"


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)
        for key, value in values.items()
    }
