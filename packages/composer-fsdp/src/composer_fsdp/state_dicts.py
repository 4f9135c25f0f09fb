"""Whole weights and optimizer state of a sharded model, as a model that is not sharded has them."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, Optimizer

from composer_dist.strategy import canonical_name
from composer_fsdp.groups import own_region

__all__ = [
    "check_optimizers",
    "names_of_parameters",
    "rebuild",
    "sync_optimizer_and_model_params",
    "update_optimizer_modules",
    "get_model",
    "get_optimizer",
    "set_model",
    "set_optimizer",
]


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


_ONE_GROUP = "Multiple optimizer groups {} are not supported with {}."
_ALL = "Passing in a subset of model parameters to the optimizer is not supported with {}."


def names_of_parameters(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the first name of each parameter, without what wrappers add to it."""
    return {parameter: canonical_name(name) for name, parameter in model.named_parameters()}


def check_optimizers(
    optimizers: Sequence[Optimizer],
    names: Mapping[nn.Parameter, str],
    *,
    use_orig_params: bool = True,
    splits_tensors: bool = False,
) -> None:
    """Refuse optimizers that cannot go on with a sharded model.

    Args:
        optimizers: Made for the model.
        names: The model's parameters.
        use_orig_params: As in `FSDPConfig`.
        splits_tensors: Whether tensor parallelism is going to split them.

    Raises:
        NotImplementedError: If there are several.
        ValueError: If one has parameters that are not the model's, or cannot work on sharded ones.
        RuntimeError: If it has several groups where that is not allowed.
    """
    if len(optimizers) > 1:
        raise NotImplementedError(
            f"Only one optimizer is supported; found {len(optimizers)} optimizers. Give one optimizer with several "
            f"parameter groups instead."
        )
    for optimizer in optimizers:
        _refuse_foreign(optimizer, names)
        if isinstance(optimizer, Adafactor):
            raise ValueError(
                "Adafactor keeps statistics of rows and columns, of which no rank has whole ones once a weight is "
                "sharded. Use AdamW, or train without sharding."
            )
        if not use_orig_params:
            _refuse_parts(optimizer, names, "use_orig_params=False", "with FSDP")
        if splits_tensors:
            _refuse_parts(optimizer, names, "tensor parallelism", "")


def rebuild(optimizers: Sequence[Optimizer], names: Mapping[nn.Parameter, str], model: nn.Module) -> None:
    """Let optimizers own the parameters of a sharded model, found by their names, in place.

    Args:
        optimizers: Whose groups keep their order and settings.
        names: The parameters before, and their names.
        model: The model after.
    """
    after = {canonical_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    for optimizer in optimizers:
        if optimizer.state:
            warnings.warn(
                f"Optimizer state will be cleared: {type(optimizer).__name__} has taken steps before its model was "
                f"sharded. Load its state from a checkpoint once it is.",
                UserWarning,
                stacklevel=2,
            )
            optimizer.state.clear()
        for group in optimizer.param_groups:
            # In place: optimizers that wrap another one share its lists.
            group["params"][:] = [after[names[p]] if p in names else p for p in group["params"]]
            sharded = [isinstance(parameter, DTensor) for parameter in group["params"]]
            if any(sharded) and not all(sharded):
                _take_one_by_one(group)


def _take_one_by_one(group: dict[str, Any]) -> None:
    """Let an optimizer not work on lists of tensors, which have to be of one kind for torch."""
    for name in ("foreach", "fused"):
        if group.get(name):
            warnings.warn(
                f"{name}=True is not followed: a group of the optimizer has parameters that are sharded and such that "
                f"are not, of which torch takes no list. Put the latter into a group of their own.",
                UserWarning,
                stacklevel=3,
            )
        if name in group:
            group[name] = False


@contextmanager
def sync_optimizer_and_model_params(optimizer: Optimizer | None, model: nn.Module) -> Iterator[None]:
    """Let an optimizer follow whatever replaces the parameters of its model inside the context.

    Args:
        optimizer: `None` for nothing to do.
        model: Its model, whose parameters keep their names.

    Raises:
        ValueError: On entering, if the optimizer has parameters that are not the model's.
    """
    names = names_of_parameters(model)
    if optimizer is not None:
        _refuse_foreign(optimizer, names)
    yield
    if optimizer is not None:
        rebuild([optimizer], names, model)


def update_optimizer_modules(
    optimizer: Optimizer, model: nn.Module, orig_param_to_name: Mapping[nn.Parameter, str]
) -> None:
    """Let an optimizer own the parameters that stand in the place of those it has, found by their names.

    Args:
        optimizer: Changed in place.
        model: With the parameters of now.
        orig_param_to_name: The parameters before, and their names.

    Raises:
        ValueError: If the optimizer has parameters that are not among those before.
    """
    _refuse_foreign(optimizer, orig_param_to_name)
    rebuild([optimizer], orig_param_to_name, model)


def _refuse_foreign(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    given = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [f"optimizer.param_id.{id(parameter)}" for parameter in given if parameter not in names]
    if foreign:
        have = set(map(id, given))
        left = [f"model.param_name.{name}" for parameter, name in names.items() if id(parameter) not in have]
        raise ValueError(
            f"The same model must be passed to the optimizer and trainer but the following parameters were not found "
            f"in the sharded model: {', '.join((foreign + left)[:20])}. Build the optimizer over the parameters of the "
            f"very model that is given."
        )


def _refuse_parts(optimizer: Optimizer, names: Mapping[nn.Parameter, str], setting: str, where: str) -> None:
    if len(optimizer.param_groups) > 1:
        raise RuntimeError(f"{_ONE_GROUP.format(where, setting).replace('  ', ' ')} Give one group.")
    if len(optimizer.param_groups[0]["params"]) < len(names):
        raise ValueError(f"{_ALL.format(setting)} Give it all parameters, and freeze those that shall not change.")
