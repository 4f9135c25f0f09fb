"""Splitting single tensors over ranks, before the parts are sharded."""

import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from composer_fsdp.keys import explain_key

__all__ = ["check_layer_plan", "split_tensors"]


def check_layer_plan(model: nn.Module, layer_plan: Mapping[str, Any]) -> None:
    """Refuse a plan that names modules which there are not, and warn of one that splits nothing.

    Raises:
        ValueError: If a pattern fits no module, or its value is no `ParallelStyle`.
    """
    if not layer_plan and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        warnings.warn(
            "tensor_parallel_degree is greater than 1, and there is no layer_plan: no tensor is split, and the ranks "
            "of a group compute the same. Give a layer_plan, such as {'blocks.*.up': ColwiseParallel()}, or leave the "
            "degree out and shard over all ranks.",
            UserWarning,
            stacklevel=2,
        )
    names = [name for name, _ in model.named_modules() if name]
    for pattern, style in layer_plan.items():
        if not isinstance(style, ParallelStyle):
            raise ValueError(
                f"layer_plan[{pattern!r}]={style!r} is no ParallelStyle. Use one of torch.distributed.tensor.parallel, "
                f"such as ColwiseParallel()."
            )
        if not any(_fits(name, pattern) for name in names):
            raise ValueError(f"layer_plan has {pattern!r}, which fits no module. {explain_key(pattern, names)}")


def split_tensors(model: nn.Module, mesh: DeviceMesh, layer_plan: Mapping[str, Any]) -> None:
    """Split the tensors of the modules that a plan names, in place. Every rank must call this."""
    parallelize_module(model, mesh, dict(layer_plan))


def _fits(name: str, pattern: str) -> bool:
    """Say whether a module's name fits a pattern, part by part, as `parallelize_module` does."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
