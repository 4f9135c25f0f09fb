"""A model's and an optimizer's state by names that no wrapper changes."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_dist.strategy import canonical_name, unwrap_model

__all__ = [
    "group_names",
    "is_sharded",
    "named_optimizer_state",
    "names_in_model",
    "parameters_by_name",
    "refuse_fsdp1",
    "weights_of",
]


def weights_of(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model without its wrappers. The tensors are the model's own."""
    refuse_fsdp1(model)
    weights: dict[str, Any] = unwrap_model(model).state_dict()
    return {canonical_name(name): value for name, value in weights.items()}


def names_in_model(model: nn.Module) -> dict[str, str]:
    """Return by the names of `weights_of` those that the unwrapped model's own `load_state_dict` takes."""
    return {canonical_name(name): name for name in unwrap_model(model).state_dict()}


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name; a tied one by each of its names. What is sharded is given as shards."""
    _reshard(model)
    named = unwrap_model(model).named_parameters(remove_duplicate=False)
    return {canonical_name(name): parameter for name, parameter in named}


def group_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each of an optimizer's groups; of a tied one, the first.

    A parameter that the model does not have, such as a loss function's, is called by its place.
    """
    names: dict[int, str] = {}
    for name, parameter in parameters_by_name(model).items():
        names.setdefault(id(parameter), name)
    return [
        [names.get(id(parameter), f"param_groups.{g}.{i}") for i, parameter in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def named_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict with names for parameters, where it had numbers."""
    refuse_fsdp1(model)
    numbered: dict[str, Any] = optimizer.state_dict()
    if "param_groups" not in numbered:
        return numbered  # an optimizer of another kind, which has its own layout
    groups: list[dict[str, Any]] = numbered["param_groups"]
    name_of = dict(_pairs(groups, group_names(model, optimizer)))
    return {
        **numbered,
        "state": {name_of.get(key, key): value for key, value in numbered["state"].items()},
        "param_groups": [{**group, "params": [name_of[number] for number in group["params"]]} for group in groups],
    }


def is_sharded(model: nn.Module) -> bool:
    """Return whether any weight is spread over ranks: by FSDP, by tensor parallelism, or both."""
    refuse_fsdp1(model)
    _reshard(model)
    return any(isinstance(weight, DTensor) for weight in model.parameters())


def refuse_fsdp1(model: nn.Module) -> None:
    """Raise if the model is one of the first FSDP, whose weights no other strategy can read."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # nobody can have wrapped a model without importing it
        return
    if any(isinstance(part, fsdp.FullyShardedDataParallel) for part in model.modules()):
        raise TypeError(
            "the model is wrapped in FullyShardedDataParallel, the first version of FSDP. Shard it with "
            "torch.distributed.fsdp.fully_shard, the second, whose checkpoints go into any model."
        )


def _reshard(model: nn.Module) -> None:
    """Let go of what a forward pass has left gathered, such as an evaluation's, which is there in place of shards."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    modules: list[Any] = list(model.modules())
    for module in modules:
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def _pairs(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> Iterator[tuple[Any, str]]:
    for group, own in zip(groups, names, strict=True):
        yield from zip(cast("list[Any]", group["params"]), own, strict=True)
