"""Splitting single tensors over ranks, before the parts are sharded."""

import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from composer_dist.strategy import canonical_name
from composer_fsdp.keys import explain_key

__all__ = ["check_layer_plan", "split_tensors"]


def check_layer_plan(model: nn.Module, layer_plan: Mapping[str, Any]) -> None:
    """Refuse a plan that names modules which there are not or cannot be split, and warn of one that splits nothing.

    Raises:
        ValueError: If a pattern fits no module, its value is no `ParallelStyle` or none for such a module, or if it
            would split a weight that another module has, too.
    """
    if not layer_plan and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        warnings.warn(
            "tensor_parallel_degree is greater than 1, and there is no layer_plan: no tensor is split, and the ranks "
            "of a group compute the same. Give a layer_plan, such as {'blocks.*.up': ColwiseParallel()}, or leave the "
            "degree out and shard over all ranks.",
            UserWarning,
            stacklevel=2,
        )
    modules = {name: module for name, module in model.named_modules() if name}
    owners = _owners(model)
    for pattern, style in layer_plan.items():
        if not isinstance(style, ParallelStyle):
            raise ValueError(
                f"layer_plan[{pattern!r}]={style!r} is no ParallelStyle. Use one of torch.distributed.tensor.parallel, "
                f"such as ColwiseParallel()."
            )
        fitting = [name for name in modules if _fits(name, pattern)]
        if not fitting:
            raise ValueError(f"layer_plan has {pattern!r}, which fits no module. {explain_key(pattern, modules)}")
        for name in fitting:
            _check_module(pattern, style, name, modules[name], owners)


def _owners(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the names of each parameter."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(canonical_name(name))
    return owners


def _check_module(
    pattern: str, style: ParallelStyle, name: str, module: nn.Module, owners: Mapping[nn.Parameter, Sequence[str]]
) -> None:
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return  # what others do to a module only they know
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise ValueError(
            f"layer_plan[{pattern!r}] is a {type(style).__name__} and fits {name!r}, a {type(module).__name__}. It "
            f"splits nn.Linear and nn.Embedding; name these inside of the module."
        )
    shared = [names for p in module.parameters() if len(names := owners[p]) > 1]
    if shared:
        raise ValueError(
            f"layer_plan[{pattern!r}] would split {shared[0][0]!r}, which is the same weight as {shared[0][1]!r} and "
            f"would no longer be. Leave the module out of the plan, or give each a weight of its own."
        )


def split_tensors(model: nn.Module, mesh: DeviceMesh, layer_plan: Mapping[str, Any]) -> None:
    """Split the tensors of the modules that a plan names, in place. Every rank must call this."""
    parallelize_module(model, mesh, dict(layer_plan))


def _fits(name: str, pattern: str) -> bool:
    """Say whether a module's name fits a pattern, part by part, as `parallelize_module` does."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
