"""Sharding a plain model while a checkpoint is loaded into it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from composer_checkpoint.modular._names import parameters_by_name
from composer_checkpoint.modular.options import CheckpointLoadOptions
from composer_dist.reproducibility import seed_context
from composer_dist.strategy import unwrap_model

__all__ = ["follow_parameters", "shard_model"]

_KEYWORDS = ("reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy", "ignored_params")


def shard_model(model: nn.Module, options: CheckpointLoadOptions, seed: int) -> None:
    """Shard a model with `fully_shard`, in place. Every rank must call this.

    Modules are sharded by themselves if their attribute `_fsdp_wrap` is true or the model's `fsdp_wrap_fn` says so, and
    what is left with the model. Weights on the device `meta` get memory for their shards, and what their modules'
    `reset_parameters` draw.

    Args:
        model: Not wrapped.
        options: Of which `fsdp_config` and `device_mesh` count.
        seed: For what is drawn.

    Raises:
        ValueError: If the model is wrapped, `fsdp_config` has an unknown keyword, or a module with tensors on `meta`
            has no `reset_parameters`.
    """
    if unwrap_model(model) is not model:
        raise ValueError(
            f"the model is wrapped in {type(model).__name__}, and shard_as_needed_during_load=True shards the model "
            f"inside. Pass the model without its wrapper."
        )
    keywords, absent = _keywords(options), _without_memory(model)
    for module in reversed(list(model.modules())):
        if module is not model and _is_wrapped(module, model):
            fully_shard(module, **keywords)
    fully_shard(model, **keywords)
    if absent:
        _initialize(absent, model, seed)


def follow_parameters(optimizer: torch.optim.Optimizer, model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Let an optimizer step the parameters that have taken the place of others.

    Args:
        optimizer: Has no state yet.
        model: With the new parameters.
        before: The old ones by name.
    """
    after = parameters_by_name(model)
    replaced = {id(parameter): after[name] for name, parameter in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(id(parameter), parameter) for parameter in group["params"]]


def _keywords(options: CheckpointLoadOptions) -> dict[str, Any]:
    config = options.fsdp_config
    if isinstance(config, Mapping):
        unknown = sorted(set(config) - {*_KEYWORDS, "mesh", "device_mesh"})
        if unknown:
            raise ValueError(
                f"fsdp_config has the keys {', '.join(map(repr, unknown))}, which torch's fully_shard does not take. "
                f"It takes {', '.join(_KEYWORDS)} and device_mesh."
            )
        given = dict(config)
    else:
        given = {name: getattr(config, name) for name in (*_KEYWORDS, "device_mesh") if hasattr(config, name)}
    mesh = options.device_mesh or given.pop("device_mesh", None) or given.pop("mesh", None)
    keywords = {name: given[name] for name in _KEYWORDS if given.get(name) is not None}
    return keywords if mesh is None else {**keywords, "mesh": mesh}


def _is_wrapped(module: nn.Module, model: nn.Module) -> bool:
    wanted = getattr(module, "_fsdp_wrap", None)
    if wanted is not None:
        return bool(wanted)
    ask: Any = getattr(model, "fsdp_wrap_fn", None)
    return ask is not None and bool(ask(module))


def _without_memory(model: nn.Module) -> list[nn.Module]:
    """Return the modules that have tensors on the device `meta`."""
    absent = [
        module
        for module in model.modules()
        if any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    ]
    unable = sorted({type(module).__name__ for module in absent if not hasattr(module, "reset_parameters")})
    if unable:
        raise ValueError(
            f"modules of the classes {', '.join(unable)} have tensors on the device 'meta' and no reset_parameters(), "
            f"so nobody can fill in what the checkpoint does not have. Give them one, or build the model on a real "
            f"device."
        )
    return absent


def _initialize(modules: list[nn.Module], model: nn.Module, seed: int) -> None:
    device = next(weight.device_mesh.device_type for weight in model.parameters() if isinstance(weight, DTensor))
    with seed_context(seed):
        for module in modules:
            module.to_empty(device=device, recurse=False)
            reset: Any = module.reset_parameters
            reset()
