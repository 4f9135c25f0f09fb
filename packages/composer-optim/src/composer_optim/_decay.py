"""What the decoupled optimizers share: the decay itself, and the frame of a step around it.

Both call PyTorch's functional forms rather than `super().step()`. PyTorch wraps the `step` of every class that it
makes an optimizer of, so with a plain AdamW elsewhere in the program the hooks on a step would run twice.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from composer_optim.schedulers import as_finite, check_flag

__all__ = ["check_group"]

# Named after the module's path in Composer, whose users tune `composer` loggers.
log = logging.getLogger("composer.optim.decoupled_weight_decay")

# A thousand steps at this rate take away 63 % of a weight. Numbers like it are usual for a coupled decay.
_LARGE_WEIGHT_DECAY = 1e-3


def get_initial_lr(group: dict[str, Any]) -> float:
    """Return the learning rate that a parameter group began with; where it has none, the present one becomes it."""
    initial_lr = group.get("initial_lr")
    if initial_lr is None:
        # A number also where `lr` is a tensor, which schedulers fill in place; read once, so nothing waits in `step`.
        initial_lr = group["initial_lr"] = float(group["lr"])
    return initial_lr


def decay_rate(lr: float | Tensor, initial_lr: float, weight_decay: float) -> float | Tensor:
    """Return the share of the weights that one step takes away."""
    if weight_decay == 0:
        return 0.0
    if isinstance(lr, Tensor):
        lr = lr.reshape(())  # PyTorch takes a learning rate of one element in any shape, its kernels in this one only
    return (lr / initial_lr if initial_lr else 1.0) * weight_decay


def shrink(params: list[Tensor], rate: float | Tensor, found_inf: Tensor | None) -> None:
    """Take `rate` of each weight away, in place, unless `found_inf` is there and not 0."""
    if isinstance(rate, float) and rate == 0.0:
        return
    for (device, _), tensors in _group_by_kernel(params).items():
        factor = 1.0 - rate
        if found_inf is not None:  # it stays on the device: the step is skipped without anybody waiting for it
            factor = 1.0 - rate * (found_inf.to(device) == 0).reshape(())
        # It is in the documentation of torch but not in its list of names.
        torch._foreach_mul_(tensors, factor)  # pyright: ignore[reportPrivateImportUsage]


def _group_by_kernel(params: list[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Sort tensors so that one kernel can take each list; mixed ones would be taken one by one."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for param in params:
        groups[param.device, param.dtype].append(param)
    return groups


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """Call the closure of a step."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def warn_of_large_decay(optimizer: Optimizer) -> None:
    """Log a warning if the weight decay looks like one for an optimizer that multiplies it by the learning rate."""
    largest = max((group["weight_decay"] for group in optimizer.param_groups), default=0.0)
    if largest >= _LARGE_WEIGHT_DECAY:
        log.warning(
            "weight_decay=%g of %s takes that share of the weights away in each step, whatever the learning rate. To "
            "get what torch's optimizers do with it, multiply it by the initial learning rate.",
            largest,
            type(optimizer).__name__,
        )


Check = Callable[[str, Any], None]


def check_group(options: Mapping[str, Any]) -> None:
    """Check the options of one group of parameters.

    Args:
        options: By name. Those that are not known here are the optimizer's own affair.

    Raises:
        TypeError: If an option is of the wrong kind.
        ValueError: If a number is NaN, infinite, or out of its range.
    """
    for name, check in _CHECKS.items():
        if name in options:
            check(name, options[name])
    if options.get("nesterov") and (options.get("momentum", 0) <= 0 or options.get("dampening", 0) != 0):
        raise ValueError(
            f"nesterov=True looks ahead along the momentum, and momentum={options.get('momentum', 0)!r}, "
            f"dampening={options.get('dampening', 0)!r}. Use a momentum above 0, and no dampening."
        )


def _check_not_negative(name: str, value: object) -> None:
    if not isinstance(value, Tensor):  # which is on a device, perhaps, and nobody waits for it
        as_finite(name, value, least=0.0)


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        as_finite(name, value)


def _check_betas(name: str, value: object) -> None:
    if isinstance(value, str | Tensor) or not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(f"{name}={value!r} must be two numbers, such as (0.9, 0.95).")
    for index, beta in enumerate(value):
        if not isinstance(beta, Tensor) and not 0 <= as_finite(f"{name}[{index}]", beta) < 1:
            raise ValueError(f"{name}[{index}]={beta!r} must be 0 or more and less than 1.")


def _check_flag_or_none(name: str, value: object) -> None:
    if value is not None:
        check_flag(name, value)


_CHECKS: Mapping[str, Check] = {
    "lr": _check_not_negative,
    "momentum": _check_not_negative,
    "dampening": _check_number,
    "weight_decay": _check_not_negative,
    "eps": _check_not_negative,
    "betas": _check_betas,
    "nesterov": check_flag,
    "amsgrad": check_flag,
    "maximize": check_flag,
    "capturable": check_flag,
    "foreach": _check_flag_or_none,
    "fused": _check_flag_or_none,
}
