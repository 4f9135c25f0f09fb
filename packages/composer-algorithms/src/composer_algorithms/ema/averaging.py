"""The average itself: one step of it over all tensors of a model."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from composer_algorithms._wrapping import (
    canonical_buffers,
    canonical_name,
    canonical_parameters,
    get_model_context_manager,
    is_dtensor,
    place_like,
    unwrap,
)
from composer_algorithms.ema.parameters import EMAParameters, give_own_memory, parameters_in

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
    if not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing={smoothing!r} is not a weight: pass a number from 0 (no memory) to 1 (no change).")
    with get_model_context_manager(model):
        if isinstance(ema_model, EMAParameters):
            pairs = _pairs_with_parameters(ema_model, model)
        elif isinstance(ema_model, nn.Module):
            pairs = _pairs_with_module(ema_model, model)
        else:
            raise ValueError(f"ema_model={ema_model!r} cannot keep an average: pass a module or EMAParameters(model).")
        _average(pairs, float(smoothing))


def _pairs_with_parameters(average: EMAParameters, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    parameters = parameters_in(model, average.named_parameters_dict)
    pairs = [(tensor, parameters[name]) for name, tensor in average.named_parameters()]
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
    targets = unwrap(average).state_dict(keep_vars=True)
    for target in targets.values():
        if isinstance(target, Tensor):
            give_own_memory(target)
    pairs = {
        id(target): (target.detach(), current[canonical_name(name)])
        for name, target in targets.items()
        if isinstance(target, Tensor) and canonical_name(name) in current
    }
    if targets and not pairs:
        raise ValueError(
            f"{type(average).__qualname__} (ema_model) and {type(model).__qualname__} (model) have no tensor name in "
            f"common: make ema_model a copy.deepcopy of the model."
        )
    return list(pairs.values())


def _average(pairs: Iterable[tuple[Tensor, Tensor]], smoothing: float) -> None:
    # One call for all tensors of a kind: launching a kernel for each costs more than the arithmetic. Only lists of one
    # dtype and device take the fast path.
    groups: defaultdict[tuple[torch.dtype, torch.device, bool], tuple[list[Tensor], list[Tensor]]]
    groups = defaultdict(lambda: ([], []))
    copied: tuple[list[Tensor], list[Tensor]] = ([], [])
    for target, source in pairs:
        distributed = is_dtensor(target)
        if distributed != is_dtensor(source):
            source = place_like(source, target)
        if not (target.is_floating_point() or target.is_complex()):
            group = copied
        elif target.dtype == source.dtype and target.device == source.device:
            group = groups[target.dtype, target.device, distributed]
        else:
            _average_mixed(target, source, smoothing)
            continue
        group[0].append(target)
        group[1].append(source)
    step = get_ema_multi_avg_fn(smoothing)
    for targets, sources in groups.values():
        step(targets, sources, None)
    for target, source in zip(*copied, strict=True):
        target.copy_(source)


def _average_mixed(target: Tensor, source: Tensor, smoothing: float) -> None:
    dtype = torch.promote_types(target.dtype, source.dtype)
    source = source.to(device=target.device, dtype=dtype)
    target.copy_(torch.lerp(target.to(dtype), source, 1 - smoothing))
