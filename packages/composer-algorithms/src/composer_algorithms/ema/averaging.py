"""The average itself: one step of it over all tensors of a model."""

import torch
from torch import Tensor, nn

from composer_algorithms._modules import check_is_module
from composer_algorithms._numbers import check_number
from composer_algorithms._wrapping import (
    canonical_buffers,
    canonical_parameters,
    get_model_context_manager,
)
from composer_algorithms.ema._plan import AveragingPlan
from composer_algorithms.ema.parameters import EMAParameters, give_own_memory, parameters_in
from composer_dist.strategy import canonical_name, unwrap_model

__all__ = ["compute_ema"]


@torch.no_grad()
def compute_ema(model: nn.Module, ema_model: nn.Module | EMAParameters, smoothing: float = 0.99) -> None:
    """Move a moving average of a model's weights one step on, in place.

    Each tensor of `ema_model` becomes `smoothing * itself + (1 - smoothing) * model's`. What is not floating point,
    such as counts and position ids, is copied from the model instead. Tensors are matched by name, whether or not one
    of the models is wrapped by DDP or torch.compile.

    Args:
        model: The model being trained. Not changed.
        ema_model: Where the average is kept: an `EMAParameters`, or a module, of which what its `state_dict` has is
            averaged. It keeps its dtypes and devices.
        smoothing: The weight in [0, 1] of the average so far. 1 leaves the average as it is, 0 copies the model.

    Raises:
        ValueError: If `smoothing` lies outside [0, 1], `ema_model` is of another type, or the two do not fit together.

    Example:
        >>> model, average = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        >>> _ = torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(average.weight)
        >>> compute_ema(model, average, smoothing=0.75)
        >>> average.weight.item()
        0.25
    """
    check_number("smoothing", smoothing, "a weight from 0 (no memory) to 1 (no change)")
    if not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing={smoothing!r} is not a weight: pass a number from 0 (no memory) to 1 (no change).")
    smoothing = float(smoothing)
    if isinstance(ema_model, EMAParameters) and (plan := ema_model.kept_plan(model)) is not None:
        plan.step(smoothing)  # finding out by name what belongs together takes longer than the arithmetic
        return
    check_is_module(model, "weights to average")
    with get_model_context_manager(model):
        if isinstance(ema_model, EMAParameters):
            plan = AveragingPlan(_pairs_with_parameters(ema_model, model))
            ema_model.keep_plan(plan, model)
        elif isinstance(ema_model, nn.Module):
            plan = AveragingPlan(_pairs_with_module(ema_model, model))
        else:
            raise ValueError(f"ema_model={ema_model!r} cannot keep an average: pass a module or EMAParameters(model).")
        plan.step(smoothing)


def _pairs_with_parameters(average: EMAParameters, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    parameters = parameters_in(model, average.named_parameters_dict)
    pairs = [
        (tensor, _of_the_same_shape(name, parameters[name], tensor)) for name, tensor in average.named_parameters()
    ]
    buffers = canonical_buffers(model, remove_duplicate=False)
    for name, tensor in average.named_buffers():
        current = buffers.get(name)
        if current is None:
            continue
        if current.shape != tensor.shape:  # a buffer that grew, as caches and position tables do
            average.named_buffers_dict[name] = current.detach().clone()
        else:
            give_own_memory(tensor)
            pairs.append((tensor, current))
    return pairs


def _pairs_with_module(average: nn.Module, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    current = {
        **canonical_parameters(model, remove_duplicate=False),
        **canonical_buffers(model, remove_duplicate=False),
    }
    # keep_vars: tied tensors are then one object under two names, and must take only one step.
    targets = unwrap_model(average).state_dict(keep_vars=True)
    for target in targets.values():
        if isinstance(target, Tensor):
            give_own_memory(target)
    pairs = {
        id(target): (target.detach(), _of_the_same_shape(name, current[canonical_name(name)], target))
        for name, target in targets.items()
        if isinstance(target, Tensor) and canonical_name(name) in current
    }
    if targets and not pairs:
        raise ValueError(
            f"{type(average).__qualname__} (ema_model) and {type(model).__qualname__} (model) have no tensor name in "
            f"common: make ema_model a copy.deepcopy of the model."
        )
    return list(pairs.values())


def _of_the_same_shape(name: str, source: Tensor, target: Tensor) -> Tensor:
    if source.shape != target.shape:
        raise ValueError(
            f"{name} has the shape {tuple(source.shape)} in the model and {tuple(target.shape)} in its average: make "
            f"the average after the last change to the model."
        )
    return source
