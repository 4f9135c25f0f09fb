"""Optimizer methods without their profiler ranges while no profiler runs.

PyTorch wraps each `step` and `zero_grad` of an optimizer in such a range, which takes longer than a small model's
whole forward pass.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch.autograd import profiler
from torch.optim import Optimizer

# PyTorch has no public way to tell whether optimizer hooks or a profiler are active.
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

__all__ = ["unwatched_step", "zero_grad"]

_ZERO_GRAD = Optimizer.zero_grad  # kept to notice a replaced method
_WRAPPER = Optimizer.profile_hook_step(lambda self: None).__code__  # shared by every wrapped `step`


def unwatched_step(given: Optimizer) -> Callable[..., Any]:
    """Return `given.step` without PyTorch's profiling wrapper, if no hook or profiler is active.

    A `step` that something else has wrapped or replaced, such as a learning rate scheduler, is returned unchanged.
    """
    step = given.step
    wrapper = getattr(step, "__func__", None)
    if getattr(wrapper, "__code__", None) is not _WRAPPER or _is_watched(given):
        return step
    return MethodType(wrapper.__wrapped__, given)  # pyright: ignore[reportOptionalMemberAccess]  # checked by its code


def zero_grad(given: Optimizer) -> None:
    """Drop the gradients of an optimizer's parameters."""
    if getattr(given.zero_grad, "__func__", None) is not _ZERO_GRAD:  # overridden by a subclass or replaced
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
