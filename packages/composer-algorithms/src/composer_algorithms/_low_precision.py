"""Common parts of the low precision norms: event, surgery and autocast dtype."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_algorithms._method import ModelSurgery
from composer_algorithms.module_surgery import replace_module_classes
from composer_dist.devices import Precision
from composer_events import Event, NoEffectWarning

_PRECISIONS = (Precision.AMP_FP16, Precision.AMP_BF16)
_APPLY_AT = (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD)


class LowPrecisionNorm(ModelSurgery):
    """Base of the algorithms that convert the norms of a model to low precision at one event."""

    surgery_rank = 5  # after the algorithms that replace norms
    acts_on = _APPLY_AT

    def __init__(self, apply_at: Event = Event.INIT) -> None:
        if apply_at not in _APPLY_AT:
            raise ValueError(
                f"apply_at={apply_at!r} is not an event at which the model may be changed. Pass one of "
                f"{', '.join(f'Event.{event.name}' for event in _APPLY_AT)}."
            )
        self.apply_at = apply_at
        self.acts_on = frozenset({apply_at})

    def __repr__(self) -> str:
        # Checkpoints record this representation, and the event must be readable from it.
        return f"{type(self).__name__}(apply_at=Event.{Event(self.apply_at).name})"


def in_autocast_dtype(
    normalize: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Call a function of input, weight and bias in the dtype of the surrounding autocast, if there is one."""
    device_type = input.device.type
    if not torch.is_autocast_enabled(device_type):
        return normalize(input, weight, bias)
    dtype = torch.get_autocast_dtype(device_type)
    # Autocast would cast the arguments back to float32.
    with torch.autocast(device_type, enabled=False):
        return normalize(input.to(dtype), *(None if one is None else one.to(dtype) for one in (weight, bias)))


def swap_norms(
    model: nn.Module,
    base: type[nn.Module],
    low: type[nn.Module],
    precision: str | Precision | None,
    optimizers: Optimizer | Sequence[Optimizer] | None,
) -> nn.Module:
    """Convert the norms of one class to their low precision form, and warn where this has no effect."""
    name = base.__name__
    if precision is None or Precision(precision) not in _PRECISIONS:
        warnings.warn(
            f"Low Precision {name} only applies to AMP_FP16 and AMP_BF16 precisions, and precision={precision!r}: the "
            f"model stays unchanged.",
            NoEffectWarning,
            stacklevel=3,
        )
        return model

    def convert(module: nn.Module, module_index: int) -> nn.Module | None:
        if not isinstance(module, low):
            if type(module).forward is not base.forward:  # a subclass with its own computation
                return None
            module.__class__ = low  # not a new object, so that parameters, hooks and optimizers keep their references
        return module

    replace_module_classes(model, {base: convert}, optimizers, include_root=True)
    if not any(isinstance(module, low) for module in model.modules()):
        warnings.warn(
            f"No instances of torch.nn.{name} found in this {type(model).__qualname__}, or only of subclasses with "
            f"a forward of their own: Low Precision {name} has no effect. Leave it out.",
            NoEffectWarning,
            stacklevel=3,
        )
    return model
