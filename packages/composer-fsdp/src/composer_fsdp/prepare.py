"""The single steps of sharding, under the names by which Composer's users call them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from composer_dist import Precision, dist, get_device, seed_context
from composer_dist.devices import Device
from composer_fsdp.config import FSDP2Config, FSDPConfig, TPConfig
from composer_fsdp.degrees import AXES
from composer_fsdp.optimizers import check_optimizers, names_of_parameters, rebuild
from composer_fsdp.plan import make_plan
from composer_fsdp.policies import function_of_policy
from composer_fsdp.sharding import shard_model
from composer_fsdp.tensor_parallel import check_layer_plan, split_tensors
from composer_fsdp.whole_gradients import average_after_backward

__all__ = ["apply_fully_shard", "prepare_fsdp_module", "prepare_fully_shard", "prepare_tp_module"]


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
