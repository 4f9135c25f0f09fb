"""Weight decay and option checks that the decoupled optimizers share.

The optimizers call PyTorch's functional forms instead of `super().step()`. PyTorch wraps the `step` of the class of
every optimizer that is constructed, so if the program also uses a plain AdamW, step hooks would run twice.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from composer_optim.schedulers import as_finite, check_flag

__all__ = ["check_group"]

# Named after the module's path in Composer, whose users tune `composer` loggers.
log = logging.getLogger("composer.optim.decoupled_weight_decay")

# A thousand steps at this rate remove 63 % of a weight. Such values are common for coupled weight decay.
_LARGE_WEIGHT_DECAY = 1e-3


def get_initial_lr(group: dict[str, Any]) -> float:
    """Return the initial learning rate of a parameter group; if it is missing, the current one is stored."""
    initial_lr = group.get("initial_lr")
    if initial_lr is None:
        # A number even if `lr` is a tensor, which schedulers change in place; read once, to avoid a synchronization.
        initial_lr = group["initial_lr"] = float(group["lr"])
    return initial_lr


def decay_rate(lr: float | Tensor, initial_lr: float, weight_decay: float) -> float | Tensor:
    """Return the fraction of the weights that one step removes."""
    if weight_decay == 0:
        return 0.0
    if isinstance(lr, Tensor):
        lr = lr.reshape(())  # PyTorch accepts one element of any shape, its kernels only this one
    return (lr / initial_lr if initial_lr else 1.0) * weight_decay


def shrink(params: list[Tensor], rate: float | Tensor, found_inf: Tensor | None) -> None:
    """Multiply the weights by `1 - rate`, in place, unless `found_inf` is given and not 0."""
    # Only for floats, because comparing a tensor would synchronize with its device.
    if isinstance(rate, float) and rate == 0.0:
        return
    # Grouped, so that one kernel processes each list: lists of several devices or dtypes are slow.
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for param in params:
        groups[param.device, param.dtype].append(param)
    for (device, _), tensors in groups.items():
        factor = 1.0 - rate
        if found_inf is not None:  # stays on the device: the step is skipped without a synchronization
            factor = 1.0 - rate * (found_inf.to(device) == 0).reshape(())
        # Documented by torch, but missing in its __all__.
        torch._foreach_mul_(tensors, factor)  # pyright: ignore[reportPrivateImportUsage]


_SIMULATED = "simgpu"  # SimulatedAccelerator, whose tensors have a type of their own
_FUSED_ON = {"cuda", _SIMULATED}
_PLAIN = {Tensor, torch.nn.Parameter}


def fit_for_fused(params: list[Tensor], grads: list[Tensor], states: Sequence[dict[str, Any]]) -> list[Tensor]:
    """Return the gradients as the fused kernel needs them, and convert state that was loaded or made without it.

    The kernel takes only tensors with the strides of the weights, and step counts only on their device.
    """
    for param, state in zip(params, states, strict=False):  # no states without momentum
        if (step := state.get("step")) is not None and step.is_cpu and not param.is_cpu:
            state["step"] = step.to(param.device, torch.float32)
    tensors = [t for state in states for name, t in state.items() if name != "step" and isinstance(t, Tensor)]
    if all(map(Tensor.is_contiguous, (*params, *grads, *tensors))):  # fast, and the usual case
        return grads
    for param, state in zip(params, states, strict=False):
        for name, value in state.items():
            if name != "step" and isinstance(value, Tensor):
                state[name] = _with_strides_of(param, value)
    return [_with_strides_of(param, grad) for param, grad in zip(params, grads, strict=True)]


def _with_strides_of(param: Tensor, tensor: Tensor) -> Tensor:
    return tensor if tensor.stride() == param.stride() else torch.empty_like(param, dtype=tensor.dtype).copy_(tensor)


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """Call the closure of a step with gradients enabled."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Decoupled(Optimizer):
    """Base class that precedes a PyTorch optimizer: option checks, initial learning rates, fused kernels on GPUs."""

    has_relative_decay: ClassVar[bool] = True  # the weight decay counts relative to the initial learning rate
    _fuses_shards: ClassVar[bool] = False

    # GradScaler reads this to know whether steps take `grad_scale` and `found_inf`, as those of fused kernels do. It is
    # no plain attribute, because the weights may be moved to a GPU after the optimizer is made.
    @property
    def _step_supports_amp_scaling(self) -> bool:
        return all(map(self._uses_fused, self.param_groups))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """Ignore the value, which PyTorch's constructors set for `fused=True`."""

    def _uses_fused(self, group: dict[str, Any]) -> bool:
        """Return whether the fused kernel steps a group: by default, if all its weights are on GPUs.

        The default is not stored in the group, which would carry it into checkpoints and from there to CPUs.
        """
        if group["fused"] is not None or group["foreach"] is not None:
            return bool(group["fused"])
        return all(
            p.device.type in _FUSED_ON
            and (type(p) in _PLAIN or p.device.type == _SIMULATED or (self._fuses_shards and hasattr(p, "to_local")))
            and p.is_floating_point()
            and (p.is_contiguous() or (p.ndim == 4 and p.is_contiguous(memory_format=torch.channels_last)))
            for p in group["params"]
        )

    def _warn_of_large_decay(self) -> None:
        largest = max((group["weight_decay"] for group in self.param_groups), default=0.0)
        if largest >= _LARGE_WEIGHT_DECAY:
            log.warning(
                "weight_decay=%g of %s removes that fraction of the weights in each step, independent of the learning "
                "rate. To get the weight decay of torch's optimizers, multiply it by the initial learning rate.",
                *(largest, type(self).__name__),
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; its current learning rate becomes its initial one.

        Args:
            param_group: `params`, and the options that differ from those of the constructor.

        Raises:
            TypeError: If an option has the wrong type.
            ValueError: If a number is NaN, infinite, or out of its range.
        """
        if isinstance(param_group, dict):  # otherwise PyTorch raises the error
            check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        get_initial_lr(self.param_groups[-1])


_LEAST = {"lr": 0, "momentum": 0, "weight_decay": 0, "eps": 0, "dampening": -math.inf}
_FLAGS = ("nesterov", "amsgrad", "maximize", "capturable", "foreach", "fused", "cautious_updates", "clip_updates")


def check_group(options: Mapping[str, Any]) -> None:
    """Validate the options of one group of parameters; unknown ones are left to the optimizer."""
    for name, value in options.items():
        if isinstance(value, Tensor):  # reading one may synchronize with its device
            continue
        if name in _LEAST:
            as_finite(name, value, least=_LEAST[name])
        elif name in _FLAGS and not (value is None and name in ("foreach", "fused")):
            check_flag(name, value)
    betas = options.get("betas", (0.0, 0.0))
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"betas={betas!r} must be two numbers, such as (0.9, 0.95).")
    for index, beta in enumerate(betas):
        if not isinstance(beta, Tensor) and not 0 <= as_finite(f"betas[{index}]", beta) < 1:
            raise ValueError(f"betas[{index}]={beta!r} must be 0 or more and less than 1.")
    if options.get("nesterov") and (options.get("momentum", 0) <= 0 or options.get("dampening", 0) != 0):
        raise ValueError(
            f"nesterov=True needs momentum above 0 and no dampening; got momentum={options.get('momentum', 0)!r}, "
            f"dampening={options.get('dampening', 0)!r}. Use a momentum above 0, and no dampening."
        )
