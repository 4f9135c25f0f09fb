"""A model's and an optimizer's state by names that no wrapper changes."""

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as tdist
from torch import nn
from torch.distributed.tensor import DTensor

from composer_checkpoint._ranks import Ranks
from composer_checkpoint._staging import storage_key
from composer_checkpoint._tree import map_tree
from composer_dist.collectives import cpu_group
from composer_dist.devices import STR_TO_DTYPE
from composer_dist.strategy import canonical_name, unwrap_model

__all__ = [
    "group_names",
    "is_sharded",
    "named_optimizer_state",
    "names_in_model",
    "parameters_by_name",
    "refuse_fsdp1",
    "weights_of",
    "Slot",
    "TensorSender",
    "fill",
    "map_slots",
    "as_dtype",
    "cast_state",
    "gather",
    "map_tensors",
    "offload",
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


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a tensor that rank 0 has."""

    index: int
    shape: torch.Size
    dtype: torch.dtype


class TensorSender:
    """Tells all ranks what rank 0 has, and then gives them the tensors, one at a time.

    Every rank must make one, and call `receive` for the same slots in the same order.

    Args:
        state: Nested dicts and lists; rank 0's is told.
    """

    def __init__(self, state: Any) -> None:
        self._ranks = Ranks()
        self._tensors: list[torch.Tensor] = []
        outline = _describe(state, self._tensors) if self._ranks.rank == 0 else None
        self.outline: Any = self._ranks.exchange(lambda: outline, lambda outlines: outlines[:1] * len(outlines))

    def receive(self, slot: Slot, target: torch.Tensor) -> None:
        """Copy this rank's part of a tensor to where it belongs."""
        if self._ranks.world_size == 1:
            fill(target, self._tensors[slot.index])
            return
        # As the target's device if ranks can talk there, which is many times faster than by way of the host.
        direct = f"{target.device.type}:" in tdist.get_backend_config()
        device = target.device if direct else torch.device("cpu")
        if self._ranks.rank == 0:
            whole = self._tensors[slot.index].to(device).contiguous()
        else:
            whole = torch.empty(slot.shape, dtype=slot.dtype, device=device)
        tdist.broadcast(whole, src=0, group=None if direct else cpu_group(None))
        fill(target, whole)


def _describe(state: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the state with a slot for each tensor, and put the tensors into the list."""

    def replace(_: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value.detach())
        return Slot(len(tensors) - 1, value.shape, value.dtype)

    return map_tree(state, replace)


def map_slots(outline: Any, change: Callable[[str, Slot], Any]) -> Any:
    """Return the outline with each slot replaced; in the same order on all ranks."""
    return map_tree(outline, lambda name, value: change(name, value) if isinstance(value, Slot) else value)


@torch.no_grad()
def fill(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor into a tensor of its shape, or into this rank's part of one."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    local = target.to_local()
    # The method through which torch's own checkpoints ask a tensor which box of the whole it holds.
    for chunk in target.__create_chunk_list__() if local.numel() else ():
        part = whole
        for dim, (start, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            part = part.narrow(dim, start, length)
        local.copy_(part)


def as_dtype(precision: str | torch.dtype) -> torch.dtype:
    """Return the dtype of a precision's name, with or without `amp_`.

    Raises:
        ValueError: If there is none, or it is not of floating point.
    """
    if isinstance(precision, torch.dtype) and precision.is_floating_point:
        return precision
    name = getattr(precision, "value", precision)  # a Precision has one
    dtype = STR_TO_DTYPE.get(str(name).lower().removeprefix("amp_"))
    if dtype is None:
        raise ValueError(
            f"precision={precision!r} is no format of floating point numbers. Use one of {', '.join(STR_TO_DTYPE)}, or "
            f"a dtype such as torch.float64."
        )
    return dtype


def cast_state(state: Any, dtype: torch.dtype, *, keep_counts: bool = False) -> Any:
    """Convert the floating point tensors of a state. Tensors that are the same memory stay so.

    Args:
        state: Nested dicts and lists.
        dtype: What to convert to.
        keep_counts: Whether a single number is left alone if converting would change it, as an optimizer's count of
            steps must be: bfloat16 cannot count beyond 256, and float16 not beyond 2048.
    """

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        converted = tensor.to(dtype) if tensor.is_floating_point() else tensor
        return tensor if keep_counts and not tensor.dim() and converted.to(tensor.dtype) != tensor else converted

    return map_tensors(state, convert)


def offload(state: Any) -> Any:
    """Move the tensors of a state to the host's memory; of those that are sharded, this rank's shards."""
    return map_tensors(state, lambda tensor: tensor.cpu())


def gather(state: Any, *, keep: bool, cpu_offload: bool) -> Any:
    """Put the shards of each tensor together, one tensor after the other. Every rank must call this.

    Args:
        state: Alike on all ranks.
        keep: Whether this rank wants the result. Others help, and get what they should not use.
        cpu_offload: Whether the whole tensors are moved to the host's memory.
    """

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if not keep:
            return torch.empty(0)  # at once, so that no more than one whole tensor is held
        return tensor.cpu() if cpu_offload else tensor

    return map_tensors(state, whole)


@torch.no_grad()
def map_tensors(state: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change the tensors, each memory once, so that tied weights remain tied."""
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
    # All empty ones seem to be in one place.
    return (tensor.dtype, storage_key(tensor)) if tensor.numel() else id(tensor)
