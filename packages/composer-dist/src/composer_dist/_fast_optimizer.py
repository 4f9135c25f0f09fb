"""An optimizer's methods without their ranges for the profiler, where no profiler runs.

PyTorch puts each `step` and `zero_grad` of an optimizer into such a range, which takes longer than a small model's
whole forward pass.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch.autograd import profiler
from torch.optim import Optimizer

# No public name tells whether there are hooks of all optimizers, of one, or a profiler.
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

__all__ = ["unwatched_step", "zero_grad"]

_ZERO_GRAD = Optimizer.zero_grad  # as PyTorch has it, should somebody put another in its place
_WRAPPER = Optimizer.profile_hook_step(lambda self: None).__code__  # of every step that PyTorch has wrapped


def unwatched_step(given: Optimizer) -> Callable[..., Any]:
    """Return what `given.step` does in the end, if nobody hooks in or looks on, else `given.step` itself.

    A `step` that anybody else has wrapped or replaced, such as a scheduler of the learning rate, is left as it is.
    """
    step = given.step
    wrapper = getattr(step, "__func__", None)
    if getattr(wrapper, "__code__", None) is not _WRAPPER or _is_watched(given):
        return step
    return MethodType(wrapper.__wrapped__, given)  # pyright: ignore[reportOptionalMemberAccess]  # checked by its code


def zero_grad(given: Optimizer) -> None:
    """Drop the gradients of an optimizer's parameters."""
    if getattr(given.zero_grad, "__func__", None) is not _ZERO_GRAD:
        given.zero_grad()
        return
    for group in given.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _is_watched(given: Any) -> bool:
    return bool(
        profiler._is_profiler_enabled
        or given._optimizer_step_pre_hooks
        or given._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )
