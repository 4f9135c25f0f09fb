"""Sharding of a model and its optimizers by a plan."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim import Optimizer

from composer_dist import Precision, dist, get_device, seed_context
from composer_dist.devices import Device
from composer_fsdp import meta_init
from composer_fsdp.activation import apply_ac
from composer_fsdp.config import AXES, FSDP2Config, FSDPConfig, ParallelismConfig, TPConfig
from composer_fsdp.gradients import average_after_backward
from composer_fsdp.groups import is_pair
from composer_fsdp.meshes import Meshes
from composer_fsdp.mixed_precision import Dtypes, Prefetching, cast_buffers, resolve_dtypes
from composer_fsdp.plan import ShardingPlan, WrapFunction, make_plan
from composer_fsdp.state_dicts import check_optimizers, names_of_parameters, rebuild
from composer_fsdp.tensor_parallel import agreed, check_layer_plan, warn_of_different_weights
from composer_fsdp.unit_selection import check_param_tying, choose
from composer_fsdp.wrap_rules import Unit, function_of_policy, stays_whole

__all__ = [
    "parallelize_composer_model",
    "parallelize_model",
    "apply_fully_shard",
    "prepare_fsdp_module",
    "prepare_fully_shard",
    "prepare_tp_module",
    "ShardedModel",
    "Sharder",
    "prefetch_ahead",
    "shard_model",
    "wrap_activations",
]


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """The result of sharding a model.

    Attributes:
        model: The model, which was changed in place.
        plan: The sharding plan.
        meshes: The device meshes.
        units: The modules that are sharded as one, descendants first.
        roots: The outermost sharded modules, each of which runs forward and backward on its own.
        whole: Trainable parameters that are not sharded. FSDP2 does not average their gradients; the caller has to.
        local_meshes: The meshes of fewer than all ranks, on which ranks have different weights.
        prefetch: The prefetching between units.
        holders: The modules that own parameters, with the names of these.
    """

    model: nn.Module
    plan: ShardingPlan
    meshes: Meshes
    units: Sequence[Unit]
    roots: Sequence[FSDPModule]
    whole: Sequence[nn.Parameter]
    local_meshes: frozenset[DeviceMesh]
    prefetch: Prefetching
    holders: Mapping[nn.Module, frozenset[str]]

    def check_unchanged(self) -> None:
        """Raise if parameters were added or moved since the model was sharded.

        FSDP would neither gather nor average a new parameter, or one that moved to another module.
        """
        late = [
            f"{prefix}.{name}".lstrip(".")
            for prefix, module in self.model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if name not in self.holders.get(module, ()) and (parameter.requires_grad or isinstance(parameter, DTensor))
        ]
        if late:
            raise ValueError(
                f"the model was changed after it was sharded: the parameters {late[:5]} are new or have moved, and "
                f"FSDP neither gathers nor averages them. Change the model before sharding it; in a Trainer, with an "
                f"algorithm that acts on Event.INIT."
            )


def shard_model(
    model: nn.Module,
    plan: ShardingPlan,
    *,
    device: torch.device,
    optimizers: Sequence[Optimizer] = (),
    mesh: DeviceMesh | None = None,
    wraps_itself: bool = False,
    wrap_fn: Callable[[nn.Module], Any] | None = None,
    check_fn: Callable[[nn.Module], bool] | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
) -> ShardedModel:
    """Shard a model and its optimizers, in place. Every rank must call this.

    Checks that need no communication run first.
    """
    choice = choose(model, plan, optimizers, wraps_itself=wraps_itself, wrap_fn=wrap_fn, check_fn=check_fn)
    syncs = plan.sync_module_states and plan.auto_wrap
    # An `FSDP2Config` has no setting for it: rank 0's weights are shared if only rank 0 has weights.
    beginning = meta_init.agree_on_beginning(model, sync=syncs, follows_weights=plan.version == 2)
    # Before sharding, while every rank still has full weights to compare.
    if beginning is meta_init.Beginning.REAL and plan.auto_wrap:
        warn_of_different_weights(model)
    # Also before sharding, while rank 0's tensors are whole.
    state = meta_init.state_to_share(model) if beginning is meta_init.Beginning.RANK_ZERO else {}
    meshes = Meshes(plan, device.type, mesh)
    with check_param_tying(model):
        if plan.layer_plan is not None and meshes.tensor is not None:
            parallelize_module(model, meshes.tensor, dict(plan.layer_plan))
        units = wrap_activations(model, plan, choice.units, choice.recomputed.__contains__)
        sharder = Sharder(plan, meshes, device)
        for unit in units:
            sharder.shard(unit)
        if beginning is meta_init.Beginning.RANK_ZERO:
            meta_init.take_rank_zero_state(model, state, sharder.storage)
        elif beginning is meta_init.Beginning.META:
            # It has no collectives, so a rank whose function fails can report that to the others.
            agreed(partial(meta_init.initialize, model, sharder.storage, param_init_fn), lambda _: {})
    _move_the_rest(model, device)
    # `fully_shard` has replaced each parameter by a DTensor, while the optimizers still hold the full weights.
    rebuild(optimizers, choice.names, model)
    sharded = ShardedModel(
        model=model,
        plan=plan,
        meshes=meshes,
        units=units,
        roots=list(_outermost(model)),
        whole=[p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)],
        local_meshes=frozenset(sharder.local_meshes),
        prefetch=prefetch_ahead(units, plan),
        holders={m: frozenset(name for name, _ in m.named_parameters(recurse=False)) for m in model.modules()},
    )
    _register_forward_methods(model)
    return sharded


class Sharder:
    """Applies `fully_shard` to units, descendants first."""

    def __init__(self, plan: ShardingPlan, meshes: Meshes, device: torch.device) -> None:
        self._plan = plan
        self._meshes = meshes
        self._ignored = {p for module in plan.ignored_modules for p in module.parameters()}
        self._device = device
        self.local_meshes: set[DeviceMesh] = set()
        self.storage = torch.device("cpu") if plan.cpu_offload else device

    def shard(self, unit: Unit) -> None:
        """Shard a unit, after its descendants."""
        options = unit.options
        dtypes = self.dtypes_of(unit)
        # A nested unit with a dtype of its own casts its outputs back, since the next module uses the plan's dtype.
        is_cast_back = not unit.is_root and dtypes.param != self._plan.dtypes.param
        offload = OffloadPolicy()
        if options.get("cpu_offload", self._plan.cpu_offload):
            offload = CPUOffloadPolicy(pin_memory=self._device.type != "cpu")  # pinning needs an accelerator
        settings: dict[str, Any] = {
            "mesh": self.mesh_of(unit),
            "reshard_after_forward": self.reshard_of(unit),
            "mp_policy": dtypes.policy(output_dtype=self._plan.dtypes.param if is_cast_back else None),
            "offload_policy": offload,
        }
        if "shard_placement_fn" in options:
            settings["shard_placement_fn"] = options["shard_placement_fn"]
        # Without ignored_params, fully_shard would also take the parameters that must stay whole.
        modules = [unit.module, *unit.partners]
        settings["ignored_params"] = self._ignored | {p for m in modules for p in m.parameters() if stays_whole(p)}
        try:
            fully_shard(modules if unit.partners else unit.module, **settings)
        except (ValueError, NotImplementedError, RuntimeError, AssertionError) as error:
            raise type(error)(f"{unit.name or 'the model'!r} cannot be sharded as a unit: {error}") from error
        for module in modules:
            for inner in _own_modules(module):
                cast_buffers(inner, dtypes.buffer)

    def dtypes_of(self, unit: Unit) -> Dtypes:
        """Return the dtypes of a unit."""
        if "mixed_precision" in unit.options:
            return resolve_dtypes(unit.options["mixed_precision"], self._plan.precision)
        return self._plan.dtypes

    def mesh_of(self, unit: Unit) -> DeviceMesh:
        """Return the ranks that shard and replicate a unit's weights. Every rank must call this."""
        group: Any = unit.options.get("process_group")
        mesh: DeviceMesh | None = unit.options.get("device_mesh")
        if mesh is not None:
            return self._noted(mesh)
        if group is None:
            return self._meshes.of_strategy(unit.options.get("sharding_strategy"))
        if is_pair(group):
            return self._noted(self._meshes.of_groups(*group))
        if unit.options.get("grad_sync") == "world":
            return self._meshes.of_groups(group, self._meshes.across(group))
        return self._noted(self._meshes.of_groups(group))

    def _noted(self, mesh: DeviceMesh) -> DeviceMesh:
        if mesh.size() < dist.get_world_size():  # other ranks have different weights
            self.local_meshes.add(mesh)
        return mesh

    def reshard_of(self, unit: Unit) -> bool | int | None:
        """Return the unit's `reshard_after_forward` for `fully_shard`."""
        options = unit.options
        if "reshard_after_forward" in options:
            return options["reshard_after_forward"]
        if (strategy := options.get("sharding_strategy")) is not None:
            return strategy in ("FULL_SHARD", "HYBRID_SHARD")
        reshard = self._plan.reshard_after_forward
        # The backward pass uses a root's weights at once, so freeing them is a waste; with None torch decides so.
        return None if unit.is_root and reshard is True and self._plan.version == 1 else reshard


def wrap_activations(
    model: nn.Module, plan: ShardingPlan, units: Sequence[Unit], check_fn: Callable[[nn.Module], bool] | None
) -> list[Unit]:
    """Apply activation checkpointing to the chosen modules; return the units with the wrappers in their place."""
    checkpoint_fn = None
    if plan.te_checkpoint_wrapper:
        checkpoint_fn = import_module("transformer_engine.pytorch").checkpoint  # optional, checked by the plan
    replaced = apply_ac(
        model,
        plan.activation_checkpointing,
        plan.activation_cpu_offload,
        check_fn,
        reentrant=plan.activation_checkpointing_reentrant,
        checkpoint_fn=checkpoint_fn,
    )
    # The wrapper is the unit, so that weights are gathered once for both of the module's forward passes.
    return [
        dataclasses.replace(
            unit,
            module=replaced.get(unit.module, unit.module),
            partners=tuple(replaced.get(partner, partner) for partner in unit.partners),
        )
        for unit in units
    ]


def _own_modules(unit: nn.Module) -> Iterator[nn.Module]:
    yield unit
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _own_modules(child)


def _outermost(module: nn.Module) -> Iterator[FSDPModule]:
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _move_the_rest(model: nn.Module, device: torch.device) -> None:
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) and parameter.device != device:
            # Assigning to `.data` keeps the parameter object, to which optimizers and tied modules refer.
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():  # `buffers()` does not allow assignment
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def prefetch_ahead(units: Sequence[Unit], plan: ShardingPlan) -> Prefetching:
    """Set up prefetching between sharded units."""
    ahead = plan.forward_prefetch_limit if plan.forward_prefetch else 0
    settings = {
        unit.name: (
            str(unit.options.get("backward_prefetch", plan.backward_prefetch)),
            plan.backward_prefetch_limit,
            int(unit.options.get("forward_prefetch_limit", ahead)),
        )
        for unit in units
    }
    return Prefetching({unit.name: unit.module for unit in units}, settings)


def _register_forward_methods(model: nn.Module) -> None:
    """Make methods other than `forward` gather the weights that they use."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            methods: tuple[str, ...] = tuple(getattr(module, "fsdp_forward_methods", ()))
            if hasattr(module, "generate") and hasattr(module, "config"):  # a model of transformers
                methods = (*methods, "generate")
            for method in dict.fromkeys(methods):
                register_fsdp_forward_method(module, method)


def parallelize_model(
    model: nn.Module,
    config: FSDP2Config | FSDPConfig | ParallelismConfig,
    optimizer: Optimizer | None = None,
    precision: str | Precision | None = None,
    fsdp_wrap_policy: Any = None,
    activation_checkpointing_check_fn: Callable[[nn.Module], bool] | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    *,
    device: str | Device | None = None,
    seed: int = 0,
) -> ShardedModel:
    """Shard a module, in place, with the module itself as the root. Every rank must call this.

    The backward pass averages all gradients over the ranks, including those of parameters that are not sharded.

    Args:
        model: Any module. Its `fsdp_wrap_fn(module)` and the other rules of `composer_fsdp.wrap_rules` choose the
            units.
        config: The settings.
        optimizer: The module's optimizer, which owns the shards afterwards.
        precision: Precision of the computation. By default `'amp_fp16'` on a GPU, or `'amp_bf16'` if trained weights
            are in bfloat16, and `'fp32'` elsewhere.
        fsdp_wrap_policy: Replacement for the module's `fsdp_wrap_fn`: such a function, or one of torch's policies.
        activation_checkpointing_check_fn: Replacement for the `activation_checkpointing_fn` of its children.
        param_init_fn: Initializes modules on the meta device that have no `param_init_fn` of their own. Their
            `reset_parameters()` when `None`.
        device: The device of this rank; the best of this machine when `None`.
        seed: Seed of weights on the meta device. The same on every rank.

    Returns:
        The sharded model and the details of its sharding.

    Raises:
        ValueError, KeyError, RuntimeError: If model, optimizer and settings do not fit together.
        TypeError: If an argument has the wrong type.
    """
    return _parallelize(
        model,
        config,
        [] if optimizer is None else [optimizer],
        precision,
        device,
        seed,
        wraps_itself=True,
        policy=fsdp_wrap_policy,
        check_fn=activation_checkpointing_check_fn,
        param_init_fn=param_init_fn,
    )


def parallelize_composer_model(
    composer_model: nn.Module,
    optimizer: Optimizer | None,
    config: FSDP2Config | FSDPConfig | ParallelismConfig,
    precision: str | Precision | None = None,
    *,
    device: str | Device | None = None,
    seed: int = 0,
) -> ShardedModel:
    """Shard the direct children of a model, in place, as the Trainer does. Every rank must call this.

    Args:
        composer_model: The model, which is not sharded itself, so that its methods may call those of its children.
        optimizer: See `parallelize_model`.
        config: See `parallelize_model`.
        precision: See `parallelize_model`.
        device: See `parallelize_model`.
        seed: See `parallelize_model`.

    Returns:
        The sharded model and the details of its sharding.

    Raises:
        ValueError, KeyError, RuntimeError: If model, optimizer and settings do not fit together.
        TypeError: If an argument has the wrong type.
    """
    several = [] if optimizer is None else [optimizer]
    return _parallelize(composer_model, config, several, precision, device, seed)


def _parallelize(
    model: nn.Module,
    config: FSDP2Config | FSDPConfig | ParallelismConfig,
    optimizers: Sequence[Optimizer],
    precision: str | Precision | None,
    device: str | Device | None,
    seed: int,
    *,
    wraps_itself: bool = False,
    policy: Any = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    check_fn: Callable[[nn.Module], bool] | None = None,
) -> ShardedModel:
    chosen = get_device(device)
    if precision is None:
        # As the Trainer chooses: a GradScaler, which amp_fp16 needs, cannot unscale gradients in bfloat16.
        is_bf16 = any(each.dtype is torch.bfloat16 and each.requires_grad for each in model.parameters())
        precision = "fp32" if chosen.name != "gpu" else "amp_bf16" if is_bf16 else "amp_fp16"

    def settle() -> tuple[ShardingPlan, WrapFunction | None]:
        # Stack levels: this function, `agreed`, `_parallelize`, the public function, the user's line.
        plan = make_plan(config, precision=precision, world_size=dist.get_world_size(), stacklevel=5)
        return plan, function_of_policy(model, policy)

    plan, wrap_fn = agreed(settle, lambda _: {})  # compared together with the units, in `choose`
    dist.initialize_dist(chosen)
    with seed_context(seed):
        sharded = shard_model(
            model,
            plan,
            device=torch.device(chosen.torch_device),
            optimizers=optimizers,
            wraps_itself=wraps_itself,
            wrap_fn=wrap_fn,
            check_fn=check_fn,
            param_init_fn=param_init_fn,
        )
    average_after_backward(sharded.whole)  # a user's own training loop has no strategy that averages them
    return sharded


def prepare_fsdp_module(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] | None,
    fsdp_config: FSDPConfig | FSDP2Config,
    precision: str | Precision,
    device: str | Device,
    auto_microbatching: bool = False,
    seed: int = 44,
) -> tuple[list[Any], dict[str, nn.Module]]:
    """Shard the direct children of a ComposerModel, in place. Every rank must call this.

    Args:
        model: The model.
        optimizers: The model's optimizers.
        fsdp_config: The settings.
        precision: Precision of the computation.
        device: The device of this rank.
        auto_microbatching: No effect.
        seed: Seed of weights on the meta device.

    Returns:
        An empty list in place of Composer's hooks, and the sharded modules by name.
    """
    several = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers or ())
    sharded = _parallelize(model, fsdp_config, several, precision, device, seed)
    return [], {unit.name: unit.module for unit in sharded.units}


def prepare_tp_module(
    model: nn.Module, tp_config: TPConfig, optimizers: Optimizer | Sequence[Optimizer] | None = None
) -> None:
    """Split the tensors of a model by its layer plan, in place. Every rank must call this.

    Args:
        model: The model.
        tp_config: The settings. Without a mesh, consecutive ranks share each tensor.
        optimizers: The model's optimizers.

    Raises:
        RuntimeError, ValueError: If an optimizer has several groups, or only some parameters.
    """
    several = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers or ())
    layer_plan = tp_config.layer_plan or {}
    names = names_of_parameters(model)
    check_optimizers(several, names, splits_tensors=True)
    check_layer_plan(model, layer_plan)
    mesh = tp_config.device_mesh
    if mesh is None:
        device_type = next((p.device.type for p in model.parameters()), "cpu")
        degree = tp_config.tensor_parallel_degree
        whole = init_device_mesh(device_type, (dist.get_world_size() // degree, degree), mesh_dim_names=AXES[1:])
        mesh = whole[AXES[2]]
    parallelize_module(model, mesh, dict(layer_plan))
    rebuild(several, names, model)


def prepare_fully_shard(
    model: nn.Module,
    config: FSDP2Config | FSDPConfig,
    precision: str | Precision | None = None,
    policy: Any = None,
) -> None:
    """Shard a plain module that is initialized on every rank, in place. Every rank must call this.

    Args:
        model: The module, which becomes the root.
        config: The settings.
        precision: Precision of the computation; `'fp32'` when `None`.
        policy: Replacement for its `fsdp_wrap_fn`: such a function, or one of torch's policies.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    plan = make_plan(config, precision=precision or "fp32", world_size=dist.get_world_size(), stacklevel=2)
    wrap_fn = function_of_policy(model, policy)
    sharded = shard_model(model, plan, device=device, wraps_itself=True, wrap_fn=wrap_fn)
    average_after_backward(sharded.whole)


apply_fully_shard = prepare_fully_shard
"""Composer's other name for `prepare_fully_shard`."""
