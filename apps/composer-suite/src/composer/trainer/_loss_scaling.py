"""Which scaler, if any, keeps small gradients from vanishing: it follows from precision, device and optimizer."""

from collections.abc import Iterable

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from composer.trainer._batch import needs_closure
from composer.trainer._scaler import ClosureGradScaler, ShardedGradScaler
from composer.trainer._step_control import takes_none
from composer_dist import Precision
from composer_dist.devices import Device

__all__ = ["check_scaler", "fit_scaler", "make_scaler"]


def make_scaler(precision: Precision, device: Device, optimizers: Iterable[Optimizer]) -> GradScaler | None:
    """Return what keeps small gradients from vanishing in 16-bit floating point; no other precision needs it.

    Raises:
        ValueError: If an optimizer evaluates the loss itself, which does not go together with the scaling.
    """
    if precision is not Precision.AMP_FP16:
        return None
    for optimizer in optimizers:
        if needs_closure(optimizer) and not takes_none(optimizer):
            raise ValueError(
                f"precision='amp_fp16' scales the loss, and {type(optimizer).__name__} evaluates it itself. Use "
                "precision='amp_bf16' or 'fp32', or another optimizer."
            )
    closures = any(needs_closure(optimizer) for optimizer in optimizers)
    return (ClosureGradScaler if closures else ShardedGradScaler)(device.torch_device.type)


def fit_scaler(scaler: GradScaler | None, optimizers: Iterable[Optimizer], device: Device) -> GradScaler | None:
    """Return a scaler, or one for closures in its place if an algorithm has put in an optimizer that calls them."""
    if type(scaler) in (GradScaler, ShardedGradScaler) and any(map(needs_closure, optimizers)):
        return ClosureGradScaler(device.torch_device.type)
    return scaler


def check_scaler(scaler: GradScaler | None, precision: Precision) -> None:
    """Refuse to train in 16-bit floating point without what keeps small gradients from vanishing.

    Raises:
        RuntimeError: If the scaler has been taken from the state, or disabled.
    """
    if precision is Precision.AMP_FP16 and (scaler is None or not scaler.is_enabled()):
        raise RuntimeError(
            f"Attempting to use grad scaling with precision={precision.value!r}, but scaler is not enabled: "
            f"state.scaler={scaler!r}. Leave the one that the Trainer made, or give precision='amp_bf16', which needs "
            "none."
        )
