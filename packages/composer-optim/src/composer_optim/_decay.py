"""What the decoupled optimizers share: the decay itself, and the frame of a step around it.

Both call PyTorch's functional forms rather than `super().step()`. PyTorch wraps the `step` of every class that it
makes an optimizer of, so with a plain AdamW elsewhere in the program the hooks on a step would run twice.
"""

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

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
