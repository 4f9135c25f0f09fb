"""State dicts of a model, an optimizer and a run."""

import platform
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as tdist
from torch import nn
from torch.distributed.tensor import DTensor

from composer_checkpoint import _spread as spread
from composer_checkpoint.modular.options import both_key_filters
from composer_dist.collectives import is_initialized
from composer_dist.devices import Device, get_device
from composer_dist.env import get_global_rank
from composer_dist.reproducibility import get_rng_state
from composer_dist.wrapping import unwrap_model
from composer_events.arguments import loaded
from composer_events.hparams import get_composer_env_dict
from composer_events.state import State, named_by_class

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

    Tensors that need not be gathered, moved or converted share the model's memory.

    Args:
        model: A plain model, one in `DistributedDataParallel`, or a compiled, FSDP2 or tensor parallel one.
        sharded_state_dict: Whether each rank gets its shards, as `DTensor`s. Otherwise rank 0 gets full tensors, and
            the other ranks an empty dict.
        precision: Dtype that floating point tensors are converted to: `'fp32'`, `'fp16'`, `'bf16'` or a dtype.
        include_keys: `fnmatch` patterns of the names to collect, such as `'encoder.*'`.
        ignore_keys: `fnmatch` patterns of the names to leave out.
        cpu_offload: Whether to move the tensors to the CPU. When `None`, only if they are not sharded.

    Raises:
        ValueError: If both kinds of patterns are passed, or the precision is unknown.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        >>> sorted(get_model_state_dict(model, include_keys="1.*"))
        ['1.bias', '1.weight']
    """
    dtype = spread.as_dtype(precision)
    weights = select_keys(spread.weights_of(model), include_keys, ignore_keys)
    return spread.cast_state(_collected(weights, sharded_state_dict, cpu_offload), dtype)


def get_optim_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sharded_state_dict: bool = False,
    precision: str | torch.dtype = "fp32",
    include_keys: Patterns = None,
    ignore_keys: Patterns = None,
    cpu_offload: bool | None = None,
) -> dict[str, Any]:
    """Collect an optimizer's state, with parameters by name. Every rank must call this.

    Args:
        model: The model, which has the parameters' names.
        optimizer: The optimizer, which is not changed. It need not have stepped.
        sharded_state_dict: As for `get_model_state_dict`.
        precision: Dtype that the floating point tensors of `state` are converted to. Step counts that it cannot
            represent exactly are not converted.
        include_keys: Not supported for optimizers.
        ignore_keys: Not supported for optimizers.
        cpu_offload: As for `get_model_state_dict`.

    Raises:
        NotImplementedError: If patterns are passed.
        ValueError: If the precision is unknown.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> get_optim_state_dict(model, torch.optim.SGD(model.parameters()))["param_groups"][0]["params"]
        ['weight']
    """
    if include_keys is not None or ignore_keys is not None:
        raise NotImplementedError(
            f"include_keys={include_keys!r} and ignore_keys={ignore_keys!r} are for weights: an optimizer with a part "
            f"of its state would train wrongly. Save all of it, and choose on loading which weights to take."
        )
    dtype = spread.as_dtype(precision)
    named = spread.named_optimizer_state(model, optimizer)
    collected = _collected(named, sharded_state_dict, cpu_offload)
    # Without shards, the dict is empty on all ranks but the first.
    if "state" in collected:
        collected["state"] = spread.cast_state(collected["state"], dtype, keep_counts=True)
    return collected


def get_metadata_state_dict(
    model: nn.Module | None = None,
    sharded_state_dict: bool | None = None,
    precision: str | torch.dtype | None = None,
    device: str | Device | None = None,
    device_train_microbatch_size: int | float | None = None,
) -> dict[str, Any]:
    """Return information about machine, versions and settings as JSON values. Loading ignores it.

    Args:
        model: Model whose class name, and Hugging Face metadata if any, are included.
        sharded_state_dict: Whether the checkpoint is sharded.
        precision: Precision of the checkpoint; `'fp32'` when `None`.
        device: Device whose communication backend is included if no process group exists.
        device_train_microbatch_size: Number of samples in a microbatch.
    """
    metadata: dict[str, Any] = {
        **get_composer_env_dict(),
        "torch_version": str(torch.__version__),
        "python_version": platform.python_version(),
        "precision": str(getattr(precision or "fp32", "value", precision or "fp32")).removeprefix("torch."),
    }
    if sharded_state_dict is not None:
        metadata["sharded_state_dict"] = sharded_state_dict
    if device_train_microbatch_size is not None:
        metadata["device_train_microbatch_size"] = device_train_microbatch_size
    if model is not None:
        innermost: Any = unwrap_model(model)
        metadata["model_name"] = _class_name(innermost)
        integration: str | None = getattr(type(innermost), "checkpoint_integration", None)  # such as 'huggingface'
        if integration is not None:
            metadata[integration] = innermost.get_metadata()
    if is_initialized():
        metadata["dist_backend"] = tdist.get_backend()
    elif device is not None:
        metadata["dist_backend"] = get_device(device).dist_backend
    return metadata


def get_resumption_state_dict(state: State) -> dict[str, Any]:
    """Collect the state that resuming needs besides weights and optimizers. Every rank must call this.

    Args:
        state: State of the run.

    Returns:
        `timestamp`, `rank_zero_seed`, `run_name`, `rng` with each rank's RNG state, and, unless they are empty,
            `stopped_duration`, `dataset_state`, `schedulers` and `scaler` by class, `callbacks` and `algorithms` as
            pairs of class and state.
    """
    resumption: dict[str, Any] = {
        "dataset_state": {name: saved for name, saved in state._dataset_state_dict().items() if saved},
        "timestamp": state.timestamp.state_dict(),
        "stopped_duration": state.stopped_duration or {},
        "schedulers": {name: each.state_dict() for name, each in named_by_class(state.schedulers)},
        "callbacks": _states(state.callbacks),
        "algorithms": _states(state.algorithms),
        "scaler": {} if state.scaler is None else dict(_states([state.scaler])),
        "rank_zero_seed": state.rank_zero_seed,
        "run_name": state.run_name,
        "rng": get_rng_state(),
    }
    # Empty entries are left out.
    return {name: value for name, value in resumption.items() if value not in ({}, [])}


def _states(objects: Iterable[Any]) -> list[tuple[str, Any]]:
    return [(type(item).__qualname__, item.state_dict()) for item in objects]


def select_keys(weights: Mapping[str, Any], include_keys: Patterns, ignore_keys: Patterns) -> dict[str, Any]:
    """Return the weights whose names match `include_keys`, or do not match `ignore_keys`."""
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


def _class_name(model: nn.Module) -> str:
    """Return the name of the model's class, not of the `FSDP` class that `fully_shard` derives from it."""
    fsdp = loaded("torch.distributed.fsdp")
    if fsdp is not None and isinstance(model, fsdp.FSDPModule):
        return next(base for base in type(model).__mro__[1:] if not issubclass(base, fsdp.FSDPModule)).__name__
    return type(model).__name__


def _collected(state: dict[str, Any], sharded: bool, cpu_offload: bool | None) -> dict[str, Any]:
    if sharded:
        return spread.map_tensors(state, lambda tensor: tensor.cpu()) if cpu_offload else state
    return spread.gather(state, keep=get_global_rank() == 0, cpu_offload=True if cpu_offload is None else cpu_offload)


_TYPES = ("full", "sharded", "local")


def check_type(state_dict_type: object) -> None:
    """Raise if a state dict type is unknown."""
    if state_dict_type not in _TYPES:
        raise ValueError(
            f"state_dict_type={state_dict_type!r} is not a type. Use 'full' for whole tensors on rank 0, "
            f"'sharded' for DTensors, or 'local' for the tensors of each rank."
        )


def of_type(state: dict[str, Any], state_dict_type: str, *, rank0_only: bool = True) -> dict[str, Any]:
    """Convert a state of `DTensor`s, the same structure on all ranks, to another type. Every rank must call this.

    Only full tensors are moved to the CPU. With `rank0_only`, ranks other than 0 get an empty dict instead of them.
    """
    if state_dict_type == "sharded":
        return state
    if state_dict_type == "local":
        return spread.map_tensors(state, lambda tensor: tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    return spread.gather(state, keep=not rank0_only or get_global_rank() == 0, cpu_offload=True)


@torch.no_grad()
def own_part(name: str, own: object, value: torch.Tensor) -> torch.Tensor:
    """Shard a tensor like the one it replaces."""
    if not isinstance(own, DTensor) or isinstance(value, DTensor):
        return value
    target = room_for(own, value.dtype)
    local = target.to_local()
    # The value is either this rank's shard or the full tensor, and only the shape tells which.
    if value.shape == local.shape:
        local.copy_(value)
    elif value.shape == own.shape:
        spread.fill(target, value)
    else:
        raise ValueError(
            f"{name} has the shape {tuple(value.shape)}, and rank {get_global_rank()} holds {tuple(local.shape)} of "
            f"{tuple(own.shape)}. What is of state_dict_type='local' fits as many ranks as it was made on, with the "
            f"model sharded alike; save with 'full' or 'sharded' for others."
        )
    return target


def room_for(own: torch.Tensor, dtype: torch.dtype) -> Any:
    """Return an uninitialized tensor, sharded like another one, on a device with memory."""
    # Shards must be on the device of their mesh.
    on_host = own.device_mesh.device_type if isinstance(own, DTensor) else "cpu"
    return torch.empty_like(own, dtype=dtype, device=on_host if own.is_meta else None, requires_grad=False)
