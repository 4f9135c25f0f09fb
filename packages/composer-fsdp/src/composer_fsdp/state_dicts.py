"""Whole weights and optimizer state of a sharded model, as a model that is not sharded has them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composer_dist.strategy import canonical_name
from composer_fsdp.placements import own_region

__all__ = ["get_model", "get_optimizer", "set_model", "set_optimizer"]


def get_model(model: nn.Module) -> dict[str, Any]:
    """Return the weights by name. Every rank must call this.

    What is sharded is gathered one tensor after the other, as copies on the host.
    """
    gathered: dict[int, Any] = {}  # tied weights once
    weights: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in gathered:
            gathered[id(value)] = _whole(value.detach() if isinstance(value, torch.Tensor) else value)
        weights[canonical_name(name)] = gathered[id(value)]
    return weights


def set_model(model: nn.Module, weights: Mapping[str, Any], *, strict: bool) -> tuple[list[str], list[str]]:
    """Load whole weights, of which each rank takes its part, in place. No rank waits for another.

    Returns:
        The names that were missing, and those that were not expected.

    Raises:
        RuntimeError: If `strict` and there are any such names, or if a shape does not fit.
    """
    own = {canonical_name(name): value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    missing = [name for name in own if name not in weights]
    unexpected = [name for name in weights if name not in own]
    problems = [f"Missing key(s) in state_dict: {', '.join(missing)}. "] if missing and strict else []
    if unexpected and strict:
        problems.append(f"Unexpected key(s) in state_dict: {', '.join(unexpected)}. ")
    problems += [
        f"size mismatch for {name}: copying a param with shape {weights[name].shape} from checkpoint, the shape in "
        f"current model is {value.shape}."
        for name, value in own.items()
        if name in weights and weights[name].shape != value.shape
    ]
    if problems:
        raise RuntimeError(f"Error(s) in loading state_dict for {type(model).__name__}:\n\t" + "\n\t".join(problems))
    with torch.no_grad():
        for name, value in own.items():
            if name in weights:
                _own_part(value).copy_(_part_of(value, weights[name]))
    return missing, unexpected


def get_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state, whole, with its own numbering of the parameters. Every rank must call this."""
    saved = optimizer.state_dict()
    state = {
        key: {name: _whole(value) for name, value in of_one.items()} if isinstance(of_one, Mapping) else of_one
        for key, of_one in saved["state"].items()
    }
    return {**saved, "state": state}


def set_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load such a state, of which each rank takes its part. No rank waits for another."""
    numbered = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    state = {
        key: {name: _like(numbered.get(key), value) for name, value in of_one.items()}
        if isinstance(of_one, Mapping)
        else of_one
        for key, of_one in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": state})


def _whole(value: Any) -> Any:
    """Return a tensor, whole, as a copy on the host, which no later step changes."""
    if not isinstance(value, torch.Tensor):
        return value
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    # What a single rank holds, or all of them do, is not gathered.
    is_own = whole.untyped_storage().data_ptr() == _own_part(value).untyped_storage().data_ptr()
    return whole.clone() if is_own and whole.device.type == "cpu" else whole.cpu()


def _own_part(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _part_of(sharded: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return own_region(sharded, whole) if isinstance(sharded, DTensor) else whole


def _like(parameter: torch.Tensor | None, value: Any) -> Any:
    """Shard what an optimizer keeps of each element of a parameter."""
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    return DTensor.from_local(
        own_region(parameter, value).clone().to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
