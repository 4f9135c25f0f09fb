"""What is saved of a model, an optimizer and a run, as dicts."""

import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as tdist
from torch import nn
from torch.distributed.tensor import DTensor

from composer_checkpoint.modular._spread import (
    as_dtype,
    cast_state,
    fill,
    gather,
    map_tensors,
    named_optimizer_state,
    offload,
    weights_of,
)
from composer_checkpoint.modular.options import both_key_filters
from composer_dist.collectives import is_initialized
from composer_dist.devices import get_device
from composer_dist.env import get_global_rank
from composer_dist.reproducibility import get_rng_state
from composer_dist.strategy import unwrap_model
from composer_events.hparams import get_composer_env_dict

if TYPE_CHECKING:
    from composer_dist.devices import Device
    from composer_events import State

__all__ = [
    "get_metadata_state_dict",
    "get_model_state_dict",
    "get_optim_state_dict",
    "get_resumption_state_dict",
    "select_keys",
]

Patterns = str | Sequence[str] | None


def get_model_state_dict(
    model: nn.Module,
    sharded_state_dict: bool = False,
    precision: str | torch.dtype = "fp32",
    include_keys: Patterns = None,
    ignore_keys: Patterns = None,
    cpu_offload: bool | None = None,
) -> dict[str, Any]:
    """Collect the weights and buffers by name, without the prefixes of wrappers. Every rank must call this.

    What need not be gathered, moved or converted is the model's own memory.

    Args:
        model: Plain, in `DistributedDataParallel`, compiled, sharded with `fully_shard` or by tensor parallelism.
        sharded_state_dict: Whether each rank gets its shards, as `DTensor`s. Otherwise rank 0 gets the whole tensors,
            and the others an empty dict.
        precision: What floating point tensors are converted to: `'fp32'`, `'fp16'`, `'bf16'` or a dtype.
        include_keys: Patterns as `fnmatch` has them, such as `'encoder.*'`; other names are left out.
        ignore_keys: Patterns of names to leave out.
        cpu_offload: Whether the tensors are moved to the host's memory; where not given, if they are not sharded.

    Raises:
        ValueError: If there are both kinds of patterns, or the precision is not known.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        >>> sorted(get_model_state_dict(model, include_keys="1.*"))
        ['1.bias', '1.weight']
    """
    dtype = as_dtype(precision)
    weights = select_keys(weights_of(model), include_keys, ignore_keys)
    collected = _collected(weights, sharded_state_dict, cpu_offload)
    return cast_state(collected, dtype)


def get_optim_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sharded_state_dict: bool = False,
    precision: str | torch.dtype = "fp32",
    include_keys: Patterns = None,
    ignore_keys: Patterns = None,
    cpu_offload: bool | None = None,
) -> dict[str, Any]:
    """Collect an optimizer's state, parameters by name. Every rank must call this.

    Args:
        model: Owns the names.
        optimizer: May not have stepped yet; it is not changed.
        sharded_state_dict: As in `get_model_state_dict`.
        precision: What the floating point tensors of `state` are converted to. Counts of steps that the precision
            could not tell apart stay as they are.
        include_keys: Not for optimizers.
        ignore_keys: Not for optimizers.
        cpu_offload: As in `get_model_state_dict`.

    Raises:
        NotImplementedError: If there are patterns.
        ValueError: If the precision is not known.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> get_optim_state_dict(model, torch.optim.SGD(model.parameters()))["param_groups"][0]["params"]
        ['weight']
    """
    if include_keys is not None or ignore_keys is not None:
        raise NotImplementedError(
            f"include_keys={include_keys!r} and ignore_keys={ignore_keys!r} are for weights: an optimizer with a part "
            f"of its state would go on wrongly. Save all of it, and choose on loading which weights to take."
        )
    dtype = as_dtype(precision)
    named = named_optimizer_state(model, optimizer)
    collected = _collected(named, sharded_state_dict, cpu_offload)
    if "state" in collected:
        collected["state"] = cast_state(collected["state"], dtype, keep_counts=True)
    return collected


def get_metadata_state_dict(
    model: nn.Module | None = None,
    sharded_state_dict: bool | None = None,
    precision: str | torch.dtype | None = None,
    device: "str | Device | None" = None,
    device_train_microbatch_size: int | float | None = None,
) -> dict[str, Any]:
    """Describe machine, versions and settings in values that JSON can hold. It is for people, and loads nothing.

    Args:
        model: Whose class is told, and what a Hugging Face model says of itself.
        sharded_state_dict: Whether the checkpoint is sharded.
        precision: The precision of the checkpoint, `'fp32'` where not given.
        device: Whose backend for communication is told while there is no process group.
        device_train_microbatch_size: How many samples go through the model at a time.
    """
    metadata: dict[str, Any] = {
        **get_composer_env_dict(),
        "torch_version": str(torch.__version__),
        "python_version": platform.python_version(),
        "precision": _precision_name("fp32" if precision is None else precision),
    }
    if sharded_state_dict is not None:
        metadata["sharded_state_dict"] = sharded_state_dict
    if device_train_microbatch_size is not None:
        metadata["device_train_microbatch_size"] = device_train_microbatch_size
    if model is not None:
        innermost: Any = unwrap_model(model)
        metadata["model_name"] = _class_name(innermost)
        # By name: the class belongs to a package on a floor above.
        if any(base.__name__ == "HuggingFaceModel" for base in type(innermost).__mro__):
            metadata["huggingface"] = innermost.get_metadata()
    if is_initialized():
        metadata["dist_backend"] = tdist.get_backend()
    elif device is not None:
        metadata["dist_backend"] = get_device(device).dist_backend
    return metadata


def get_resumption_state_dict(state: "State") -> dict[str, Any]:
    """Collect what a run needs to go on, besides weights and optimizers. Every rank must call this.

    Args:
        state: The run's.

    Returns:
        `timestamp`, `rank_zero_seed`, `run_name`, `rng` with each rank's random state, and, unless they are empty,
            `stopped_duration`, `dataset_state`, `schedulers` and `scaler` by class, `callbacks` and `algorithms` as
            pairs of class and state.
    """
    resumption: dict[str, Any] = {
        "dataset_state": {name: saved for name, saved in state._dataset_state_dict().items() if saved},
        "timestamp": state.timestamp.state_dict(),
        "stopped_duration": state.stopped_duration or {},
        "schedulers": dict(named_by_class(state.schedulers)),
        "callbacks": [(type(callback).__qualname__, callback.state_dict()) for callback in state.callbacks],
        "algorithms": [(type(algorithm).__qualname__, algorithm.state_dict()) for algorithm in state.algorithms],
        "scaler": {} if state.scaler is None else dict(named_by_class([state.scaler])),
        "rank_zero_seed": state.rank_zero_seed,
        "run_name": state.run_name,
        "rng": get_rng_state(),
    }
    return {name: value for name, value in resumption.items() if value not in ({}, [])}


def named_by_class(objects: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the state of each object with the name of its class; the second of one class is `Name#1`."""
    seen: dict[str, int] = {}
    for item in objects:
        name = type(item).__qualname__
        count = seen[name] = seen.get(name, -1) + 1
        yield (f"{name}#{count}" if count else name), item.state_dict()


def select_keys(weights: Mapping[str, Any], include_keys: Patterns, ignore_keys: Patterns) -> dict[str, Any]:
    """Return the weights whose names match, or do not match.

    Raises:
        ValueError: If there are both kinds of patterns.
    """
    if include_keys is not None and ignore_keys is not None:
        raise ValueError(both_key_filters(include_keys, ignore_keys))
    patterns = include_keys if include_keys is not None else ignore_keys
    if patterns is None:
        return dict(weights)
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    return {
        name: value
        for name, value in weights.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns) == (include_keys is not None)
    }


def _collected(state: dict[str, Any], sharded: bool, cpu_offload: bool | None) -> dict[str, Any]:
    if sharded:
        return offload(state) if cpu_offload else state
    keep = get_global_rank() == 0
    gathered = gather(state, keep=keep, cpu_offload=True if cpu_offload is None else cpu_offload)
    return gathered if keep else {}


def _class_name(model: nn.Module) -> str:
    """Return the class of the model as it was written: `fully_shard` puts `FSDP` before it, in a class of its own."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(model, fsdp.FSDPModule):
        return next(base for base in type(model).__mro__[1:] if not issubclass(base, fsdp.FSDPModule)).__name__
    return type(model).__name__


def _precision_name(precision: str | torch.dtype) -> str:
    if isinstance(precision, torch.dtype):
        return str(precision).removeprefix("torch.")
    return str(getattr(precision, "value", precision))


_TYPES = ("full", "sharded", "local")


def check_type(state_dict_type: object) -> None:
    """Refuse what is none of the three types.

    Raises:
        ValueError: With the types.
    """
    if state_dict_type not in _TYPES:
        raise ValueError(
            f"state_dict_type={state_dict_type!r} is none that there is. Use 'full' for whole tensors on rank 0, "
            f"'sharded' for DTensors, or 'local' for the tensors of each rank."
        )


def of_type(state: dict[str, Any], state_dict_type: str, *, rank0_only: bool = True) -> dict[str, Any]:
    """Return a state that is of `DTensor`s as another type has it. Every rank must call this for `'full'`.

    Args:
        state: Nested dicts and lists, alike on all ranks.
        state_dict_type: Only whole tensors are moved to the host.
        rank0_only: Whether other ranks get nothing of what is whole.
    """
    if state_dict_type == "sharded":
        return state
    if state_dict_type == "local":
        return map_tensors(state, _local)
    keep = not rank0_only or get_global_rank() == 0
    gathered = gather(state, keep=keep, cpu_offload=True)
    return gathered if keep else {}


@torch.no_grad()
def own_part(name: str, own: object, value: torch.Tensor) -> torch.Tensor:
    """Return a rank's tensor spread as the one is that it shall replace.

    Args:
        name: For the error.
        own: What it replaces.
        value: This rank's part, or the whole; a `DTensor` stays as it is.

    Raises:
        ValueError: If it is neither.
    """
    if not isinstance(own, DTensor) or isinstance(value, DTensor):
        return value
    target = room_for(own, value.dtype)
    local = target.to_local()
    if value.shape == local.shape:
        local.copy_(value)
    elif value.shape == own.shape:
        fill(target, value)
    else:
        raise ValueError(
            f"{name} has the shape {tuple(value.shape)}, and rank {get_global_rank()} holds {tuple(local.shape)} of "
            f"{tuple(own.shape)}. What is of state_dict_type='local' fits as many ranks as it was made on, with the "
            f"model sharded alike; save with 'full' or 'sharded' for others."
        )
    return target


def room_for(own: torch.Tensor, dtype: torch.dtype) -> Any:
    """Return a tensor with any values, spread as another one is, on a device that has memory."""
    on_host = own.device_mesh.device_type if isinstance(own, DTensor) else "cpu"
    return torch.empty_like(own, dtype=dtype, device=on_host if own.is_meta else None, requires_grad=False)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
