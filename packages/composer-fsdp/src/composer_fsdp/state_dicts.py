"""Full (unsharded) model and optimizer state dicts of a sharded model."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, Optimizer

from composer_dist.wrapping import canonical_name
from composer_fsdp.groups import own_region


def get_model(model: nn.Module) -> dict[str, Any]:
    """Return the full model state dict. Every rank must call this.

    Sharded tensors are gathered one at a time and copied to the host.
    """
    gathered: dict[int, Any] = {}  # gathers tied weights once and keeps them tied
    weights: dict[str, Any] = {}
    # `keep_vars` returns the parameters themselves, so that tied ones are recognized by identity.
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in gathered:
            gathered[id(value)] = _whole(value.detach() if isinstance(value, torch.Tensor) else value)
        weights[canonical_name(name)] = gathered[id(value)]
    return weights


def set_model(model: nn.Module, weights: Mapping[str, Any], *, strict: bool) -> tuple[list[str], list[str]]:
    """Load a full model state dict in place; each rank copies its part, without communication.

    Returns:
        The missing names and the unexpected names.
    """
    own = {canonical_name(name): value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    missing = [name for name in own if name not in weights]
    unexpected = [name for name in weights if name not in own]
    # Collect all problems before copying anything, so that an error leaves the model unchanged.
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
                whole = weights[name]
                _own_part(value).copy_(own_region(value, whole) if isinstance(value, DTensor) else whole)
    return missing, unexpected


def get_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return the full optimizer state dict, with parameters numbered as usual. Every rank must call this."""
    saved = optimizer.state_dict()
    state = {
        key: {name: _whole(value) for name, value in of_one.items()} if isinstance(of_one, Mapping) else of_one
        for key, of_one in saved["state"].items()
    }
    return {**saved, "state": state}


def set_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a full optimizer state dict; each rank takes its part, without communication."""
    # An optimizer state dict numbers the parameters in the order of the groups.
    numbered = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    state = {
        key: {name: _like(numbered.get(key), value) for name, value in of_one.items()}
        if isinstance(of_one, Mapping)
        else of_one
        for key, of_one in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": state})


def _whole(value: Any) -> Any:
    """Return a full copy of a tensor on the host, which later steps do not change."""
    if not isinstance(value, torch.Tensor):
        return value
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    # `full_tensor` and `cpu` return the same storage if there is nothing to gather or to move.
    is_own = whole.untyped_storage().data_ptr() == _own_part(value).untyped_storage().data_ptr()
    return whole.clone() if is_own and whole.device.type == "cpu" else whole.cpu()


def _own_part(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _like(parameter: torch.Tensor | None, value: Any) -> Any:
    """Shard per-element optimizer state like its parameter; return other values as they are."""
    # State of another shape, such as a step count, is not per element and stays whole.
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    return DTensor.from_local(
        # Cloned, since a view would keep the full tensor in memory.
        own_region(parameter, value).clone().to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def names_of_parameters(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the first name of each parameter, without prefixes added by wrappers."""
    return {parameter: canonical_name(name) for name, parameter in model.named_parameters()}


def check_optimizers(
    optimizers: Sequence[Optimizer],
    names: Mapping[nn.Parameter, str],
    *,
    use_orig_params: bool = True,
    splits_tensors: bool = False,
) -> None:
    """Validate that the optimizers support sharding of their model."""
    for optimizer in optimizers:
        _refuse_foreign(optimizer, names)
        if isinstance(optimizer, Adafactor):
            raise ValueError(
                "Adafactor keeps statistics of whole rows and columns, which no rank holds once a weight is sharded. "
                "Use AdamW, or train without sharding."
            )
        # Composer's texts.
        needs_all = [("use_orig_params=False", " with FSDP")] if not use_orig_params else []
        for setting, where in [*needs_all, *([("tensor parallelism", "")] if splits_tensors else [])]:
            # Needs groups by the roles of parameters, and handles all placements.
            if getattr(optimizer, "uses_matrix_shapes", False):
                continue
            if len(optimizer.param_groups) > 1:
                raise RuntimeError(
                    f"Multiple optimizer groups{where} are not supported with {setting}. Give one group."
                )
            if len(optimizer.param_groups[0]["params"]) < len(names):
                raise ValueError(
                    f"Passing in a subset of model parameters to the optimizer is not supported with {setting}. Give "
                    f"it all parameters, and freeze those that should not change."
                )


def rebuild(optimizers: Sequence[Optimizer], names: Mapping[nn.Parameter, str], model: nn.Module) -> None:
    """Replace the parameters of optimizers with those of the sharded model, matched by name, in place."""
    after = {canonical_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    for optimizer in optimizers:
        if optimizer.state:
            warnings.warn(
                f"Optimizer state will be cleared: {type(optimizer).__name__} has taken steps before its model was "
                f"sharded. Load its state from a checkpoint once it is.",
                UserWarning,
                stacklevel=2,
            )
            optimizer.state.clear()  # its keys are the old parameters
        for group in optimizer.param_groups:
            # Assign in place: optimizers that wrap another one share its lists.
            group["params"][:] = [after[names[p]] if p in names else p for p in group["params"]]
    separate_kinds(optimizers)


def separate_kinds(optimizers: Sequence[Optimizer]) -> None:
    """Disable foreach and fused kernels for groups with both DTensors and plain tensors, which these do not accept."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if len({isinstance(parameter, DTensor) for parameter in group["params"]}) == 1:
            continue
        for name in ("foreach", "fused"):
            if group.get(name):
                warnings.warn(
                    f"{name}=True is not followed: a group of the optimizer has sharded and unsharded parameters, "
                    f"which torch's {name} kernels do not accept together. Put the unsharded ones into a group of "
                    f"their own.",
                    UserWarning,
                    stacklevel=3,
                )
            if name in group:
                group[name] = False


@contextmanager
def sync_optimizer_and_model_params(optimizer: Optimizer | None, model: nn.Module) -> Iterator[None]:
    """Update an optimizer on exit with the parameters that replaced those of its model inside the context.

    Args:
        optimizer: The optimizer; `None` to do nothing.
        model: The model, whose parameters keep their names.

    Raises:
        ValueError: On entry, if the optimizer has parameters that are not in the model.
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
    """Replace the parameters of an optimizer with the current ones of the model, matched by name.

    Args:
        optimizer: The optimizer, changed in place.
        model: The model with the current parameters.
        orig_param_to_name: The original parameters and their names.

    Raises:
        ValueError: If the optimizer has parameters that are not among the original ones.
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
            f"in the sharded model: {', '.join((foreign + left)[:20])}. Build the optimizer from the parameters of the "
            f"model that you pass."
        )
