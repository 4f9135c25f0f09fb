"""Temporary access to the full parameters of a sharded model."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_dist import dist
from composer_fsdp.groups import own_region

__all__ = ["get_summon_params_fn", "summon_full_params_fsdp2", "validate_all_dtensors_are_fsdp_based"]


@contextmanager
def summon_full_params_fsdp2(
    model: nn.Module,
    writeback: bool = True,
    recurse: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Replace sharded parameters with full, plain ones inside the context. All ranks must enter and exit it together.

    Tied parameters are gathered once and stay tied. The shards are restored on exit, also after an error.

    Args:
        model: A model with sharded modules.
        writeback: Whether to keep changes made inside: each rank copies its part of its own full tensors, which all
            ranks must have changed in the same way. With `rank0_only` the tensors of rank 0 are broadcast.
        recurse: Whether to also gather the units nested in the model's own unit.
        rank0_only: Whether only rank 0 has full parameters; the others keep their shards.
        offload_to_cpu: Whether to put the full parameters on the host.
        with_grads: Whether to also gather gradients. They are not written back.

    Raises:
        ValueError: If a parameter is also split by tensor parallelism.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> with summon_full_params_fsdp2(layer):  # what is not sharded is as it is
        ...     layer.weight.shape
        torch.Size([1, 2])
    """
    validate_all_dtensors_are_fsdp_based(model)
    places = _places(model, recurse)
    is_here = not rank0_only or dist.get_global_rank() == 0
    whole: dict[DTensor, nn.Parameter] = {}
    with torch.no_grad():
        for shard in places:
            # A collective: every rank takes part, even if only rank 0 keeps the result.
            gathered = _gathered(shard, offload_to_cpu)
            grad = _gathered(shard.grad, offload_to_cpu) if with_grads and isinstance(shard.grad, DTensor) else None
            if is_here:
                whole[shard] = nn.Parameter(gathered, requires_grad=shard.requires_grad)
                whole[shard].grad = grad
    try:
        for shard, parameter in whole.items():
            for module, name in places[shard]:
                module._parameters[name] = parameter  # bypasses the checks of `setattr`
        yield
    finally:
        for shard, owners in places.items():
            for module, name in owners:
                module._parameters[name] = cast("nn.Parameter", shard)
        # After the shards are back, so that the model is intact even if this fails.
        with torch.no_grad():
            for shard in places if writeback else ():
                if not rank0_only:
                    shard.to_local().copy_(own_region(shard, whole[shard].detach()))
                    continue
                # On the shard's device, which the collective's backend supports; the full tensor may be on the host.
                sent = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
                if shard in whole:
                    sent.copy_(whole[shard].detach())
                dist.broadcast(sent, src=0)
                shard.to_local().copy_(own_region(shard, sent))


def get_summon_params_fn(model: nn.Module) -> Callable[..., AbstractContextManager[Any]]:
    """Return `summon_full_params_fsdp2`, or a null context with the same arguments if the model is not sharded."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return summon_full_params_fsdp2
    return lambda *args, **kwargs: nullcontext()


def validate_all_dtensors_are_fsdp_based(model: nn.Module) -> None:
    """Validate that every DTensor parameter of a model is managed by FSDP2 alone.

    Raises:
        ValueError: If a parameter is distributed otherwise. The message names it.
    """
    managed: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            managed.update(id(p) for p in module.parameters() if isinstance(p, DTensor))
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        axes = parameter.device_mesh.mesh_dim_names or ()
        if id(parameter) not in managed or "tensor_parallel" in axes:
            raise ValueError(
                f"the parameter {name!r} is a DTensor of the mesh {parameter.device_mesh}, which FSDP2 does not manage "
                f"alone. Full parameters are available only for models without tensor parallelism."
            )


def _places(model: nn.Module, recurse: bool) -> dict[DTensor, list[tuple[nn.Module, str]]]:
    places: dict[DTensor, list[tuple[nn.Module, str]]] = {}
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                places.setdefault(parameter, []).append((module, name))
        for child in module.children():
            if recurse or not isinstance(child, FSDPModule):
                walk(child)

    # After a forward pass the root may still have its gathered parameters registered in place of the shards.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    walk(model)
    return places


def _gathered(shard: DTensor, offload_to_cpu: bool) -> torch.Tensor:
    with torch.no_grad():
        whole = shard.full_tensor().clone()  # on a single rank `full_tensor` may return the shard's own memory
    return whole.cpu() if offload_to_cpu else whole
