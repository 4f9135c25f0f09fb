"""One function that shards a plain module, for a training loop of one's own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from composer_dist import Precision, dist, get_device, seed_context
from composer_dist.devices import Device
from composer_fsdp.agreement import agreed
from composer_fsdp.config import FSDP2Config, FSDPConfig, ParallelismConfig
from composer_fsdp.plan import ShardingPlan, make_plan
from composer_fsdp.policies import function_of_policy
from composer_fsdp.sharding import ShardedModel, shard_model
from composer_fsdp.unit_options import WrapFunction
from composer_fsdp.whole_gradients import average_after_backward

__all__ = ["parallelize_composer_model", "parallelize_model"]


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
