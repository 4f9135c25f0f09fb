"""Which weights can be sharded, which stay whole on every rank, and which neither can be."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import is_lazy

from composer_dist.strategy import canonical_name
from composer_fsdp.checks import warn
from composer_fsdp.plan import ShardingPlan
from composer_fsdp.wrap_rules import Unit, has_forward, stays_whole

__all__ = ["check_units", "left_whole"]


def left_whole(model: nn.Module, plan: ShardingPlan) -> set[nn.Parameter]:
    """Return the parameters that stay whole wherever they are: of ignored modules, and those without rows to share."""
    ignored = {p for module in plan.ignored_modules for p in module.parameters()}
    return ignored | {p for p in model.parameters() if stays_whole(p)}


def check_units(model: nn.Module, units: Sequence[Unit], plan: ShardingPlan) -> None:
    """Refuse units with weights that cannot be sharded together, and warn of those whose weights nobody would gather.

    Args:
        model: Whose units they are.
        units: Descendants first.
        plan: How they are going to be sharded.

    Raises:
        ValueError: With the names of the unit and of the weight.
    """
    names = {parameter: canonical_name(name) for name, parameter in model.named_parameters()}
    taken = left_whole(model, plan)
    for unit in units:
        modules = (unit.module, *unit.partners)
        if any(isinstance(module, FSDPModule) for module in modules):
            raise ValueError(
                f"{_called(unit)} is sharded already. Shard a model that is as it was built, or say auto_wrap=False if "
                f"it shall stay as it is."
            )
        own = [p for p in _parameters(modules) if p not in taken]
        taken.update(own)
        for parameter in own:
            _refuse(names[parameter], parameter)
        _refuse_sparse(unit, [m for outer in modules for m in outer.modules()], set(own))
        _refuse_formats(unit, own, names)
        if own and not has_forward(unit.module):
            warn(
                f"{_called(unit)} is sharded as one, and its class {type(unit.module).__name__} has no forward, so "
                f"that nobody gathers the weights that it holds. Let it be an nn.ModuleList or nn.ModuleDict, or name "
                f"the methods that compute with them in its attribute fsdp_forward_methods.",
                stacklevel=2,
            )


def _called(unit: Unit) -> str:
    return f"the module {unit.name!r}" if unit.name else "the model"


def _parameters(modules: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    yield from dict.fromkeys(p for module in modules for p in module.parameters())


def _refuse(name: str, parameter: nn.Parameter) -> None:
    if is_lazy(parameter):
        raise ValueError(
            f"the parameter {name!r} has no shape yet, so that it cannot be shared out. Let the model see a batch "
            f"before it is sharded, or give its layers their sizes."
        )
    if not parameter.is_contiguous():
        raise ValueError(
            f"the parameter {name!r} of shape {tuple(parameter.shape)} has strides {parameter.stride()}, and only "
            f"contiguous tensors can be sharded. Assign a contiguous copy of it before: "
            f"parameter.data = parameter.data.contiguous()."
        )
    if parameter.is_complex() and parameter.requires_grad:
        raise ValueError(
            f"the parameter {name!r} is {parameter.dtype}, of whose gradients only the real part would be averaged. "
            f"Keep it as real numbers (torch.view_as_real), and make complex ones of them in forward."
        )


def _refuse_sparse(unit: Unit, modules: Sequence[nn.Module], own: set[nn.Parameter]) -> None:
    for module in modules:
        is_sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if is_sparse and module.weight.requires_grad and module.weight in own:
            raise ValueError(
                f"{_called(unit)} has {module!r}, whose gradients are sparse tensors, which ranks cannot share out. "
                f"Make it with sparse=False."
            )


def _refuse_formats(unit: Unit, own: Sequence[nn.Parameter], names: dict[nn.Parameter, str]) -> None:
    """Refuse trainable weights of several formats in one unit, which FSDP2 reduces together."""
    by_format: dict[torch.dtype, str] = {}
    for parameter in own:
        if parameter.requires_grad:
            by_format.setdefault(parameter.dtype, names[parameter])
    if len(by_format) > 1:
        listed = ", ".join(f"{name!r} in {str(dtype).removeprefix('torch.')}" for dtype, name in by_format.items())
        raise ValueError(
            f"{_called(unit)} is sharded as one and has weights of several formats: {listed}. Let the modules of each "
            f"format be units of their own by fsdp_wrap_fn, or make the model in one format; in which it computes, "
            f"mixed_precision says."
        )
