"""Applying a function to the tensors of a module of which some, or all, are on the meta device."""

from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["meta_safe_apply"]


@torch.no_grad()
def meta_safe_apply(
    module: nn.Module,
    fn: Callable[[torch.Tensor], torch.Tensor],
    ignored_modules: Collection[str | nn.Module] = (),
    module_name: str = "",
) -> nn.Module:
    """Put what a function makes of each parameter, gradient and buffer in its place, tied ones still tied.

    A parameter stays the same object, which optimizers know, unless it leaves the meta device or goes there.

    Args:
        module: With all that is inside it. Of a sharded model, the outermost unit, since a unit owns what is inside.
        fn: Called once with each tensor, such as `lambda tensor: torch.empty_like(tensor, device="cpu")`.
        ignored_modules: What is left as it is: modules, with all inside them, or names of modules, parameters and
            buffers.
        module_name: With which those names begin, where the module is inside another one.

    Returns:
        The module.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        >>> model = meta_safe_apply(model, lambda tensor: torch.zeros_like(tensor, device="cpu"), {"1"})
        >>> [parameter.device.type for parameter in model.parameters()]
        ['cpu', 'cpu', 'meta', 'meta']
    """
    parameters: dict[torch.Tensor, nn.Parameter] = {}
    buffers: dict[torch.Tensor, torch.Tensor] = {}
    for name, part in _walk(module, module_name, ignored_modules):
        for key, parameter in part._parameters.items():
            if parameter is None or _join(name, key) in ignored_modules:
                continue
            if parameter not in parameters:
                parameters[parameter] = _applied(parameter, fn)
            part._parameters[key] = parameters[parameter]
        for key, buffer in part._buffers.items():
            if buffer is None or _join(name, key) in ignored_modules:
                continue
            if buffer not in buffers:
                buffers[buffer] = fn(buffer)
            part._buffers[key] = buffers[buffer]
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part._apply(lambda tensor: tensor)  # when units look at their tensors anew
    return module


def _walk(module: nn.Module, name: str, ignored: Collection[str | nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if module in ignored or (name and name in ignored):
        return
    yield name, module
    for child_name, child in module.named_children():
        yield from _walk(child, _join(name, child_name), ignored)


def _applied(parameter: nn.Parameter, fn: Callable[[torch.Tensor], torch.Tensor]) -> nn.Parameter:
    applied, grad = fn(parameter), None if parameter.grad is None else fn(parameter.grad)
    if applied.is_meta == parameter.is_meta:
        parameter.data = applied
    else:  # PyTorch keeps no object across that border
        parameter = nn.Parameter(applied, requires_grad=parameter.requires_grad)
    parameter.grad = grad
    return parameter


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
