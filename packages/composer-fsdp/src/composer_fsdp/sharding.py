"""A model and its optimizer, sharded by a plan."""

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
from torch.optim import Optimizer

from composer_dist import Precision, dist, get_device, seed_context
from composer_dist.devices import Device
from composer_fsdp import meta_init
from composer_fsdp.activation import apply_ac
from composer_fsdp.choice import check_param_tying, choose
from composer_fsdp.config import AXES, FSDP2Config, FSDPConfig, ParallelismConfig, TPConfig
from composer_fsdp.gradients import average_after_backward
from composer_fsdp.groups import is_pair
from composer_fsdp.meshes import Meshes
from composer_fsdp.mixed_precision import Dtypes, Prefetching, cast_buffers, resolve_dtypes
from composer_fsdp.plan import ShardingPlan, WrapFunction, make_plan
from composer_fsdp.state_dicts import check_optimizers, names_of_parameters, rebuild
from composer_fsdp.tensor_parallel import agreed, check_layer_plan, split_tensors, warn_of_different_weights
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
    """What became of a model.

    Attributes:
        model: The model, which was changed in place.
        plan: What it was sharded by.
        meshes: How the ranks are arranged.
        units: What was sharded as one, descendants first.
        roots: The outermost sharded modules, each of which runs forward and backward by itself.
        whole: The trainable parameters that every rank has whole, whose gradients nobody averages but the strategy.
        local_meshes: The meshes on which a part of the ranks have weights of their own.
        prefetch: Which units gather which others ahead.
        holders: The modules that have parameters of their own, with the names of these.
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
        """Refuse parameters that the model was given since, of which the ranks that train it do not know.

        Also one that was there already and has moved to another module is where nobody gathers it.

        Raises:
            ValueError: With their names.
        """
        late = [
            f"{prefix}.{name}".lstrip(".")
            for prefix, module in self.model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if name not in self.holders.get(module, ()) and (parameter.requires_grad or isinstance(parameter, DTensor))
        ]
        if late:
            raise ValueError(
                f"the model was changed after it was sharded: {late[:5]} were not there, so that their ranks would "
                f"neither gather nor average them. Change the model before it is sharded; in a Trainer, by an "
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
    """Shard a model, in place, and let its optimizers own the shards. Every rank must call this.

    All that can be refused without asking other ranks is refused first.

    Args:
        model: Whose direct children are sharded.
        plan: How.
        device: Where this rank computes.
        optimizers: Made for the model.
        mesh: The mesh of all axes, if somebody has made it.
        wraps_itself: Whether the model itself is the root, in place of its children.
        wrap_fn: In place of the `fsdp_wrap_fn` of the roots.
        check_fn: In place of the `activation_checkpointing_fn` of the children.
        param_init_fn: Fills weights on the meta device for which no module has a function of that name.

    Raises:
        ValueError, KeyError, NotImplementedError, RuntimeError: If model, optimizers and plan do not go together.
    """
    choice = choose(model, plan, optimizers, wraps_itself=wraps_itself, wrap_fn=wrap_fn, check_fn=check_fn)
    syncs = plan.sync_module_states and plan.auto_wrap
    beginning = meta_init.agree_on_beginning(model, sync=syncs, follows_weights=plan.version == 2)
    if beginning is meta_init.Beginning.REAL and plan.auto_wrap:
        warn_of_different_weights(model)
    state = meta_init.state_to_share(model) if beginning is meta_init.Beginning.RANK_ZERO else {}
    meshes = Meshes(plan, device.type, mesh)
    with check_param_tying(model):
        if plan.layer_plan is not None and meshes.tensor is not None:
            split_tensors(model, meshes.tensor, plan.layer_plan)
        units = wrap_activations(model, plan, choice.units, choice.recomputed.__contains__)
        sharder = Sharder(plan, meshes, device)
        for unit in units:
            sharder.shard(unit)
        if beginning is meta_init.Beginning.RANK_ZERO:
            meta_init.take_rank_zero_state(model, state, sharder.storage)
        elif beginning is meta_init.Beginning.META:
            # No rank waits for another in it, so that all can be told of one whose function fails.
            agreed(partial(meta_init.initialize, model, sharder.storage, param_init_fn), lambda _: {})
    _move_the_rest(model, device)
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
    """Gives one unit after the other to `fully_shard`."""

    def __init__(self, plan: ShardingPlan, meshes: Meshes, device: torch.device) -> None:
        self._plan = plan
        self._meshes = meshes
        self._ignored = {p for module in plan.ignored_modules for p in module.parameters()}
        self._device = device
        self.local_meshes: set[DeviceMesh] = set()
        self.storage = torch.device("cpu") if plan.cpu_offload else device

    def shard(self, unit: Unit) -> None:
        """Shard one unit, whose descendants have been."""
        options = unit.options
        dtypes = self.dtypes_of(unit)
        settings: dict[str, Any] = {
            "mesh": self.mesh_of(unit),
            "reshard_after_forward": self.reshard_of(unit),
            "mp_policy": dtypes.policy(output_dtype=self._output_dtype(unit, dtypes)),
            "offload_policy": self._offload_of(unit),
        }
        if "shard_placement_fn" in options:
            settings["shard_placement_fn"] = options["shard_placement_fn"]
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
        """Return the formats in which a unit computes."""
        if "mixed_precision" in unit.options:
            return resolve_dtypes(unit.options["mixed_precision"], self._plan.precision)
        return self._plan.dtypes

    def mesh_of(self, unit: Unit) -> DeviceMesh:
        """Return the ranks that share and replicate a unit's weights. Every rank must call this."""
        group: Any = unit.options.get("process_group")
        mesh: DeviceMesh | None = unit.options.get("device_mesh")
        if mesh is not None:
            return self._noted(mesh)
        if group is None:
            return self._meshes.of_strategy(_strategy_of(unit))
        if is_pair(group):
            return self._noted(self._meshes.of_groups(*group))
        if unit.options.get("grad_sync") == "world":
            return self._meshes.of_groups(group, self._meshes.across(group))
        return self._noted(self._meshes.of_groups(group))

    def _noted(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return a mesh, and remember it if other ranks have weights of their own."""
        if mesh.size() < dist.get_world_size():
            self.local_meshes.add(mesh)
        return mesh

    def reshard_of(self, unit: Unit) -> bool | int | None:
        """Return whether a unit's weights are freed after its forward pass, as `fully_shard` takes it."""
        options = unit.options
        if "reshard_after_forward" in options:
            return options["reshard_after_forward"]
        if (strategy := _strategy_of(unit)) is not None:
            return strategy in ("FULL_SHARD", "HYBRID_SHARD")
        reshard = self._plan.reshard_after_forward
        # What is freed at the end of a root's forward pass is gathered again at once; torch knows.
        return None if unit.is_root and reshard is True and self._plan.version == 1 else reshard

    def _offload_of(self, unit: Unit) -> OffloadPolicy:
        if not unit.options.get("cpu_offload", self._plan.cpu_offload):
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self._device.type != "cpu")  # there is nothing to pin for

    def _output_dtype(self, unit: Unit, dtypes: Dtypes) -> torch.dtype | None:
        """Return what a unit in another format than the rest gives to the rest."""
        return None if unit.is_root or dtypes.param == self._plan.dtypes.param else self._plan.dtypes.param


def _strategy_of(unit: Unit) -> str | None:
    strategy = unit.options.get("sharding_strategy")
    return None if strategy is None else strategy.upper()


def wrap_activations(
    model: nn.Module, plan: ShardingPlan, units: Sequence[Unit], check_fn: Callable[[nn.Module], bool] | None
) -> list[Unit]:
    """Let the chosen modules compute their activations again; return the units with what took their places."""
    checkpoint_fn = None
    if plan.te_checkpoint_wrapper:
        checkpoint_fn = import_module("transformer_engine.pytorch").checkpoint  # optional; the plan has looked for it
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
    """Yield a unit's module and its descendants, without those of units inside it."""
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
    """Move what is not sharded to the device, in place."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) and parameter.device != device:
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():  # `buffers()` gives nothing to assign to
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def prefetch_ahead(units: Sequence[Unit], plan: ShardingPlan) -> Prefetching:
    """Tell sharded units which others to gather ahead."""
    return Prefetching({u.name: u.module for u in units}, {u.name: _prefetch_of(u, plan) for u in units})


def _prefetch_of(unit: Unit, plan: ShardingPlan) -> tuple[str, int, int]:
    kind = str(unit.options.get("backward_prefetch", plan.backward_prefetch)).upper()
    ahead = plan.forward_prefetch_limit if plan.forward_prefetch else 0
    return kind, plan.backward_prefetch_limit, int(unit.options.get("forward_prefetch_limit", ahead))


def _register_forward_methods(model: nn.Module) -> None:
    """Let methods other than `forward` gather the weights that they use."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            methods: tuple[str, ...] = tuple(getattr(module, "fsdp_forward_methods", ()))
            if hasattr(module, "generate") and hasattr(module, "config"):  # as models of transformers have
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
    """Shard a module, in place, the module itself being the outermost unit. Every rank must call this.

    A backward pass averages the gradients over the ranks, also of what is not sharded.

    Args:
        model: Any module. Which of its descendants are units of their own its `fsdp_wrap_fn(module)` says, and
            the other rules of `composer_fsdp.wrap_rules`.
        config: The settings.
        optimizer: Made for the module; it owns the shards afterwards.
        precision: In which the weights compute. By default `'amp_fp16'` on a GPU, and `'fp32'` elsewhere.
        fsdp_wrap_policy: In place of the module's `fsdp_wrap_fn`: a function like it, or one of torch's policies.
        activation_checkpointing_check_fn: In place of the `activation_checkpointing_fn` of its children.
        param_init_fn: Fills the weights of a module, of those that have no `param_init_fn` of their own, where the
            model is on the meta device. By default its `reset_parameters()` does.
        device: Where this rank computes; the best of this machine when `None`.
        seed: With which weights are drawn that are on the meta device. The same on every rank.

    Returns:
        The model with what became of it.

    Raises:
        ValueError, KeyError, RuntimeError: If model, optimizer and settings do not go together.
        TypeError: If one of them is none.
    """
    return _parallelize(
        model,
        config,
        optimizer,
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
        composer_model: Itself it is not sharded, so that its methods may call those of its children.
        optimizer: See `parallelize_model`.
        config: See `parallelize_model`.
        precision: See `parallelize_model`.
        device: See `parallelize_model`.
        seed: See `parallelize_model`.

    Returns:
        The model with what became of it.

    Raises:
        ValueError, KeyError, RuntimeError: If model, optimizer and settings do not go together.
        TypeError: If one of them is none.
    """
    return _parallelize(composer_model, config, optimizer, precision, device, seed)


def _parallelize(
    model: nn.Module,
    config: FSDP2Config | FSDPConfig | ParallelismConfig,
    optimizer: Optimizer | None,
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
        precision = "amp_fp16" if chosen.name == "gpu" else "fp32"

    def settle() -> tuple[ShardingPlan, WrapFunction | None]:
        _check_kinds(model, optimizer, param_init_fn)
        plan = make_plan(config, precision=precision, world_size=dist.get_world_size(), stacklevel=5)
        return plan, function_of_policy(model, policy)

    plan, wrap_fn = agreed(settle, lambda _: {})  # what they say is compared with all else, once there are units
    dist.initialize_dist(chosen)
    with seed_context(seed):
        sharded = shard_model(
            model,
            plan,
            device=torch.device(chosen.torch_device),
            optimizers=[] if optimizer is None else [optimizer],
            wraps_itself=wraps_itself,
            wrap_fn=wrap_fn,
            check_fn=check_fn,
            param_init_fn=param_init_fn,
        )
    average_after_backward(sharded.whole)
    return sharded


def _check_kinds(model: Any, optimizer: Any, param_init_fn: Any) -> None:
    for name, value, kind in (("model", model, nn.Module), ("optimizer", optimizer, Optimizer | None)):
        if not isinstance(value, kind):
            raise TypeError(
                f"{name}={value!r} is a {type(value).__name__}. Give the {name} itself, one of "
                f"{'torch.nn.Module' if kind is nn.Module else 'torch.optim'}."
            )
    if param_init_fn is not None and not callable(param_init_fn):
        raise TypeError(f"param_init_fn={param_init_fn!r} is no function. Give one that fills the weights of a module.")


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
        optimizers: Made for it.
        fsdp_config: The settings.
        precision: In which the weights compute.
        device: Where this rank computes.
        auto_microbatching: Without effect: nothing has to be prepared for it.
        seed: With which weights are drawn that are on the meta device.

    Returns:
        An empty list, where there once were hooks, and the modules that are sharded, by name.
    """
    several = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers or ())
    chosen = get_device(device)
    plan = make_plan(fsdp_config, precision=precision, world_size=dist.get_world_size(), stacklevel=2)
    with seed_context(seed):
        sharded = shard_model(model, plan, device=chosen.torch_device, optimizers=several)
    average_after_backward(sharded.whole)
    return [], {unit.name: unit.module for unit in sharded.units}


def prepare_tp_module(
    model: nn.Module, tp_config: TPConfig, optimizers: Optimizer | Sequence[Optimizer] | None = None
) -> None:
    """Split the tensors of a model by its layer plan, in place. Every rank must call this.

    Args:
        model: The model.
        tp_config: The settings. Without a mesh, ranks with consecutive numbers hold a tensor together.
        optimizers: Made for the model.

    Raises:
        RuntimeError, ValueError: If an optimizer has several groups, or a part of the parameters.
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
    split_tensors(model, mesh, layer_plan)
    rebuild(several, names, model)


def prepare_fully_shard(
    model: nn.Module,
    config: FSDP2Config | FSDPConfig,
    precision: str | Precision | None = None,
    policy: Any = None,
) -> None:
    """Shard a plain module that has weights on every rank, in place. Every rank must call this.

    Args:
        model: Itself the outermost unit.
        config: The settings.
        precision: In which the weights compute; `'fp32'` when `None`.
        policy: In place of its `fsdp_wrap_fn`: a function like it, or one of torch's policies.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    plan = make_plan(config, precision=precision or "fp32", world_size=dist.get_world_size(), stacklevel=2)
    wrap_fn = function_of_policy(model, policy)
    sharded = shard_model(model, plan, device=device, wraps_itself=True, wrap_fn=wrap_fn)
    average_after_backward(sharded.whole)


apply_fully_shard = prepare_fully_shard
"""The same: Composer has both names."""
