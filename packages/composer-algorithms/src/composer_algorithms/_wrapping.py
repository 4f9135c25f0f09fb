"""Look through whatever wraps a model: at its tensors under the names that the bare model gives them."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from composer_dist.strategy import canonical_name, is_model_deepspeed, unwrap_model


def canonical_parameters(model: nn.Module, remove_duplicate: bool = True) -> dict[str, Tensor]:
    """Return the model's parameters by canonical name, tied ones once or under each of their names.

    Of DeepSpeed's engine they are those that its optimizer moves, whole. Every rank must call this; they may be copies,
    so changes take effect with `write_parameters`.
    """
    named = unwrap_model(model).named_parameters(remove_duplicate=remove_duplicate)
    if is_model_deepspeed(model):
        from composer_dist.deepspeed_state import gather_weights  # few train with it

        weights = gather_weights(model)
        named = [(name, weights[name].requires_grad_(parameter.requires_grad)) for name, parameter in named]
    return _by_canonical_name(named)


def write_parameters(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put changed tensors of `canonical_parameters` into the model where they may be copies: DeepSpeed's engine."""
    if is_model_deepspeed(model):
        from composer_dist.deepspeed_state import scatter_weights

        names = {canonical_name(name): name for name in unwrap_model(model).state_dict()}
        scatter_weights(model, {names[name]: value for name, value in values.items()}, strict=False)


def canonical_buffers(model: nn.Module, remove_duplicate: bool = True) -> dict[str, Tensor]:
    """Return the model's buffers by canonical name, those that are not saved included."""
    return _by_canonical_name(unwrap_model(model).named_buffers(remove_duplicate=remove_duplicate))


@contextmanager
def get_model_context_manager(model: nn.Module) -> Iterator[None]:
    """Make the parameters of a sharded model ready to be read and written.

    FSDP2 (`fully_shard`): parameters that forward left gathered go back to being the shards, as DTensors. FSDP1: the
    whole parameters are gathered, and scattered again at the end. Every rank must enter it. Other models: nothing.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a process that has not imported it has no sharded model
    if fsdp is None:
        yield
        return
    modules: list[Any] = list(model.modules())
    for module in modules:
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()
    if not any(isinstance(module, fsdp.FullyShardedDataParallel) for module in modules):
        yield
        return
    with fsdp.FullyShardedDataParallel.summon_full_params(model):
        yield


def has_flat_parameters(model: nn.Module) -> bool:
    """Answer whether FSDP1 keeps parameters of the model as slices of larger tensors."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules())


def is_sharded_by_fsdp(model: nn.Module) -> bool:
    """Answer whether FSDP of either version shards any part of the model."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    return any(isinstance(module, kinds) for module in model.modules())


def is_dtensor(tensor: Tensor) -> bool:
    """Answer whether the tensor is distributed over a mesh of devices."""
    distributed = sys.modules.get("torch.distributed.tensor")  # without it there are no DTensors
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def place_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor where `like` is: on its device, and distributed over its mesh if `like` is.

    Where one is distributed and the other is not, every rank must call it.
    """
    if is_dtensor(like) and not is_dtensor(tensor):
        from torch.distributed.tensor import distribute_tensor  # loaded already, or there would be no DTensor

        # Every rank holds the whole tensor, so each cuts out its own shard and none is sent.
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)  # pyright: ignore[reportAttributeAccessIssue]  # a DTensor's
    if is_dtensor(tensor) and not is_dtensor(like):
        return tensor.full_tensor().to(like.device)  # pyright: ignore[reportAttributeAccessIssue]  # a DTensor's
    return tensor.to(like.device)


def _by_canonical_name(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {canonical_name(name): tensor for name, tensor in named_tensors}
