"""Collect the state of models and optimizers by names without wrappers, and transfer it between ranks."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as tdist
from torch import nn
from torch.distributed.tensor import DTensor

from composer_checkpoint._ranks import Ranks
from composer_checkpoint._tree import map_tree
from composer_dist.collectives import cpu_group
from composer_dist.devices import STR_TO_DTYPE
from composer_dist.wrapping import canonical_name, unwrap_model
from composer_events.arguments import loaded
from composer_events.state_layout import names_of_groups, with_names


def weights_of(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model without its wrappers. The tensors are the model's own."""
    refuse_fsdp1(model)
    weights: dict[str, Any] = unwrap_model(model).state_dict()
    return {canonical_name(name): value for name, value in weights.items()}


def names_in_model(model: nn.Module) -> dict[str, str]:
    """Return the names in the unwrapped model's `load_state_dict`, by the names in `weights_of`."""
    return {canonical_name(name): name for name in unwrap_model(model).state_dict()}


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name, a tied one under each of its names. Sharded ones are returned as shards."""
    _reshard(model)
    named = unwrap_model(model).named_parameters(remove_duplicate=False)
    return {canonical_name(name): parameter for name, parameter in named}


def group_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each of an optimizer's groups, as in saved states."""
    _reshard(model)
    return names_of_groups(model, optimizer)


def named_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict with names instead of numbers for the parameters."""
    refuse_fsdp1(model)
    numbered: dict[str, Any] = optimizer.state_dict()
    if "param_groups" not in numbered:
        return numbered  # not a torch optimizer, so the layout is its own
    return with_names(numbered, group_names(model, optimizer))


def is_sharded(model: nn.Module) -> bool:
    """Return whether any weight is sharded, by FSDP, tensor parallelism, or both."""
    refuse_fsdp1(model)
    _reshard(model)
    return any(isinstance(weight, DTensor) for weight in model.parameters())


def refuse_fsdp1(model: nn.Module) -> None:
    """Raise if the model is wrapped in FSDP1, whose weights this package cannot read."""
    # Looked up instead of imported, since the import is slow.
    fsdp = loaded("torch.distributed.fsdp")
    if fsdp is None:  # never imported, so no model is wrapped
        return
    if any(isinstance(part, fsdp.FullyShardedDataParallel) for part in model.modules()):
        raise TypeError(
            "the model is wrapped in FullyShardedDataParallel, the first version of FSDP. Shard it with "
            "torch.distributed.fsdp.fully_shard, the second, whose checkpoints go into any model."
        )


def _reshard(model: nn.Module) -> None:
    """Free full parameters that a forward pass, as in evaluation, has left in place of the shards."""
    fsdp = loaded("torch.distributed.fsdp")
    if fsdp is None:
        return
    modules: list[Any] = list(model.modules())
    for module in modules:
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


@dataclass(frozen=True, slots=True)
class Slot:
    index: int
    shape: torch.Size
    dtype: torch.dtype


class TensorSender:
    """Send a state from rank 0 to all ranks: first its structure, then the tensors, one at a time.

    Every rank must create a sender, and call `receive` for the same slots in the same order.
    """

    def __init__(self, state: Any) -> None:
        self._ranks = Ranks()
        self._tensors: list[torch.Tensor] = []

        def replace(_: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            self._tensors.append(value.detach())
            return Slot(len(self._tensors) - 1, value.shape, value.dtype)

        self.outline: Any = self._ranks.from_first(lambda: map_tree(state, replace))

    def receive(self, slot: Slot, target: torch.Tensor) -> None:
        if self._ranks.world_size == 1:
            fill(target, self._tensors[slot.index])
            return
        # On the target's device if the backend supports it, which is many times faster than on the CPU.
        direct = f"{target.device.type}:" in tdist.get_backend_config()
        device = target.device if direct else torch.device("cpu")
        if self._ranks.rank == 0:
            whole = self._tensors[slot.index].to(device).contiguous()
        else:
            whole = torch.empty(slot.shape, dtype=slot.dtype, device=device)
        tdist.broadcast(whole, src=0, group=None if direct else cpu_group(None))
        fill(target, whole)


def map_slots(outline: Any, change: Callable[[str, Slot], Any]) -> Any:
    return map_tree(outline, lambda name, value: change(name, value) if isinstance(value, Slot) else value)


@torch.no_grad()
def fill(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a full tensor into a tensor of its shape, or this rank's part of it into a shard."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    local = target.to_local()
    # This private method, which torch's own checkpoints use, returns the part of the full tensor that a shard holds.
    for chunk in target.__create_chunk_list__() if local.numel() else ():
        box = tuple(slice(start, start + length) for start, length in zip(chunk.offsets, chunk.sizes, strict=True))
        local.copy_(whole[box])


def as_dtype(precision: str | torch.dtype) -> torch.dtype:
    """Return the dtype of a precision, given by name with or without `amp_`."""
    if isinstance(precision, torch.dtype) and precision.is_floating_point:
        return precision
    name = getattr(precision, "value", precision)  # a Precision is an enumeration
    dtype = STR_TO_DTYPE.get(str(name).lower().removeprefix("amp_"))
    if dtype is None:
        raise ValueError(
            f"precision={precision!r} is not a floating point format. Use one of {', '.join(STR_TO_DTYPE)}, or "
            f"a dtype such as torch.float64."
        )
    return dtype


def cast_state(state: Any, dtype: torch.dtype, *, keep_counts: bool = False) -> Any:
    """Convert the floating point tensors of a state. Tensors that share memory remain shared.

    With `keep_counts`, a scalar stays unchanged if the conversion would change its value. An optimizer's step count
    needs this: bfloat16 counts up to 256, and float16 up to 2048.
    """

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        converted = tensor.to(dtype) if tensor.is_floating_point() else tensor
        return tensor if keep_counts and not tensor.dim() and converted.to(tensor.dtype) != tensor else converted

    return map_tensors(state, convert)


def gather(state: Any, *, keep: bool, cpu_offload: bool) -> Any:
    """Gather the shards of each tensor, one tensor after another, on ranks that `keep` it. Every rank must call this.

    The state has the same structure on all ranks. The result of other ranks is empty.
    """

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if not keep:
            return torch.empty(0)  # at once, so that only one full tensor exists at a time
        return tensor.cpu() if cpu_offload else tensor

    gathered = map_tensors(state, whole)
    return gathered if keep else {}


@torch.no_grad()
def map_tensors(state: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a state with changed tensors. Tensors that share memory are changed once, so that they remain tied."""
    changed: dict[Hashable, torch.Tensor] = {}

    def visit(_: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = _identity(value)
        if key not in changed:
            changed[key] = change(value.detach())
        return changed[key]

    return map_tree(state, visit)


def _identity(tensor: torch.Tensor) -> Hashable:
    if isinstance(tensor, DTensor):
        return tensor.placements, tensor.shape, _identity(tensor.to_local())
    from composer_checkpoint._staging import storage_key  # here, since few loads need it

    # Empty tensors may all have the same address, so they are distinguished by object identity.
    return (tensor.dtype, storage_key(tensor)) if tensor.numel() else id(tensor)
