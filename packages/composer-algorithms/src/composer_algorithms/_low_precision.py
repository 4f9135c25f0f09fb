"""What the low precision norms share: when they are put in, and in which dtype they compute."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_algorithms.module_surgery import replace_module_classes
from composer_dist.devices import Precision
from composer_events.algorithm import Algorithm
from composer_events.event import Event
from composer_events.warnings import NoEffectWarning

if TYPE_CHECKING:
    from composer_events.state import State

_PRECISIONS = (Precision.AMP_FP16, Precision.AMP_BF16)
_APPLY_AT = (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD)


class LowPrecisionNorm(Algorithm):
    """Base of an algorithm that changes the norms of a model on one event.

    Args:
        apply_at: The event: `Event.INIT`, `Event.BEFORE_LOAD` or `Event.AFTER_LOAD`.

    Raises:
        ValueError: If it is another one.
    """

    surgery_rank = 5
    acts_on = _APPLY_AT

    def __init__(self, apply_at: Event = Event.INIT) -> None:
        if apply_at not in _APPLY_AT:
            raise ValueError(
                f"apply_at={apply_at!r} is no event on which the model may be changed. Pass one of "
                f"{', '.join(f'Event.{event.name}' for event in _APPLY_AT)}."
            )
        self.apply_at = apply_at
        self.acts_on = frozenset({apply_at})

    @staticmethod
    def required_on_load() -> bool:
        """Answer yes: training goes on in the precision that it had."""
        return True

    def match(self, event: Event, state: "State") -> bool:
        """Answer whether the event is the one to act on."""
        return event == self.apply_at

    def __repr__(self) -> str:
        # A checkpoint names the event in this way, which can be read back.
        return f"{type(self).__name__}(apply_at=Event.{Event(self.apply_at).name})"


def to_autocast_dtype(tensor: Tensor | None, device_type: str) -> Tensor | None:
    """Return the tensor in the dtype of the autocast around, or as it is where there is none."""
    if tensor is None or not torch.is_autocast_enabled(device_type):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device_type))


def swap_norms(
    model: nn.Module,
    base: type[nn.Module],
    low: type[nn.Module],
    precision: str | Precision | None,
    optimizers: Optimizer | Sequence[Optimizer] | None,
) -> nn.Module:
    """Turn the norms of one class into their low precision form, and warn where that has no effect."""
    name = base.__name__
    if precision is None or Precision(precision) not in _PRECISIONS:
        warnings.warn(
            f"Low Precision {name} only applies to AMP_FP16 and AMP_BF16 precisions, and precision={precision!r}: the "
            f"model is left as it is.",
            NoEffectWarning,
            stacklevel=3,
        )
        return model

    def convert(module: nn.Module, module_index: int) -> nn.Module | None:
        return to_low_precision(module, base, low)

    replace_module_classes(model, {base: convert}, optimizers, include_root=True)
    if not any(isinstance(module, low) for module in model.modules()):
        warnings.warn(
            f"No instances of torch.nn.{name} found in this {type(model).__qualname__}, or only of subclasses that "
            f"compute something of their own: Low Precision {name} has no effect. Leave it out.",
            NoEffectWarning,
            stacklevel=3,
        )
    return model


def to_low_precision(module: nn.Module, base: type[nn.Module], low: type[nn.Module]) -> nn.Module | None:
    """Make a norm compute in low precision, in place; `None` if it is a subclass that computes something else.

    The class of the object changes, so that its parameters, hooks and place in optimizers stay.

    Raises:
        TypeError: If the module is no norm of the class.
    """
    if not isinstance(module, base):
        raise TypeError(f"module={module!r} is no torch.nn.{base.__name__}: only those have a low precision form.")
    if isinstance(module, low):
        return module
    if type(module).forward is not base.forward:
        return None
    module.__class__ = low
    return module
