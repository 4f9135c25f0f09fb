"""Whole parameters in place of the shards, for a while."""

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
    """Let a model have whole, plain parameters inside the context. Every rank must enter and leave it together.

    Tied parameters appear once, and stay tied. The shards are back afterwards, also after an error.

    Args:
        model: A model of which parts are sharded.
        writeback: Whether what is changed inside is kept: each rank takes its part of its own whole tensors, which all
            ranks must have changed alike. With `rank0_only` those of rank 0 are sent to all.
        recurse: Whether units inside the model's own unit are gathered, too.
        rank0_only: Gather whole parameters on rank 0 alone; the others keep their shards.
        offload_to_cpu: Put the whole parameters on the host.
        with_grads: Gather the gradients, too. They are not written back.

    Raises:
        ValueError: If a parameter is split by tensor parallelism, too.

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
            gathered = _gathered(shard, offload_to_cpu)
            grad = _gathered(shard.grad, offload_to_cpu) if with_grads and isinstance(shard.grad, DTensor) else None
            if is_here:
                whole[shard] = nn.Parameter(gathered, requires_grad=shard.requires_grad)
                whole[shard].grad = grad
    try:
        for shard, parameter in whole.items():
            for module, name in places[shard]:
                module._parameters[name] = parameter  # `setattr` would refuse to put one kind in place of the other
        yield
    finally:
        for shard, owners in places.items():
            for module, name in owners:
                module._parameters[name] = cast("nn.Parameter", shard)
        if writeback:
            _write_back(list(places), whole, rank0_only=rank0_only)


def get_summon_params_fn(model: nn.Module) -> Callable[..., AbstractContextManager[Any]]:
    """Return what gives a model whole parameters for a while, as `summon_full_params_fsdp2` does.

    Of a model that is not sharded the parameters are whole already, and nothing is done.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return summon_full_params_fsdp2
    return lambda *args, **kwargs: nullcontext()


def validate_all_dtensors_are_fsdp_based(model: nn.Module) -> None:
    """Refuse a model of which a parameter is spread by anything else than sharding.

    Raises:
        ValueError: With the parameter's name.
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
                f"the parameter {name!r} is a DTensor of the mesh {parameter.device_mesh}, which is not of sharding "
                f"alone. Only models without tensor parallelism can have whole parameters for a while."
            )


def _places(model: nn.Module, recurse: bool) -> dict[DTensor, list[tuple[nn.Module, str]]]:
    """Return each sharded parameter with the modules and names that have it."""
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

    # What a forward pass has left gathered is registered in place of the shards.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    walk(model)
    return places


def _gathered(shard: DTensor, offload_to_cpu: bool) -> torch.Tensor:
    with torch.no_grad():
        whole = shard.full_tensor().clone()
    return whole.cpu() if offload_to_cpu else whole


def _write_back(shards: list[DTensor], whole: dict[DTensor, nn.Parameter], *, rank0_only: bool) -> None:
    with torch.no_grad():
        for shard in shards:
            if not rank0_only:
                shard.to_local().copy_(own_region(shard, whole[shard].detach()))
                continue
            sent = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
            if shard in whole:
                sent.copy_(whole[shard].detach())
            dist.broadcast(sent, src=0)
            shard.to_local().copy_(own_region(shard, sent))
