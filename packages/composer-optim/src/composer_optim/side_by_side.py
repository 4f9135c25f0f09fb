"""One learning rate that PyTorch's schedulers and Composer's move together: the product of what each makes of it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

__all__ = ["step_schedulers"]


class SharedRate:
    """The factor of one parameter group: what PyTorch's schedulers made of its rate, times Composer's factor.

    PyTorch's schedulers work out the next rate from the current one, which must not have Composer's factor in it, and
    a factor of 0 cannot be divided out again. So the rate without it is kept here. `LambdaLR` saves and loads what is
    in the `__dict__` of such an object: the rate and the last factor, so that a run resumes with the very same
    numbers. The rest is in slots, since it belongs to this run.

    Args:
        product: Answers Composer's factor of now.
        initial_lr: The group's rate at first, which `LambdaLR` multiplies.
        rate: The group's rate without Composer's factor.
    """

    __slots__ = ("__dict__", "_product", "is_held")

    is_composers = True

    def __init__(self, product: Callable[[int], float], initial_lr: float, rate: float) -> None:
        self._product = product
        self.is_held = False
        self.initial_lr = initial_lr
        self.rate = rate
        self.factor = 1.0

    def __call__(self, step: int) -> float:
        """Answer the factor, with Composer's part as it was last if it is held."""
        if not self.is_held:
            self.factor = self._product(step)
        # A rate that began at 0 has no factor relative to that: it stays 0.
        return self.factor * (self.rate / self.initial_lr if self.initial_lr else 1.0)


def step_schedulers(schedulers: Iterable[LRScheduler], *, composer: bool = True, pytorch: bool = True) -> None:
    """Step what `compile_composer_schedulers` returned: schedulers of both kinds side by side, or those of one kind.

    Side by side their own `step()` would not do: a scheduler of PyTorch's goes on from the rate that it finds in the
    optimizer, and it must find its own there. After this the optimizer has the product again; where only PyTorch's are
    stepped, with Composer's factor as it was.

    Args:
        schedulers: What `compile_composer_schedulers` returned.
        composer: Whether to step Composer's, which is due after every batch.
        pytorch: Whether to step PyTorch's, which is due as often as their lengths count: mostly after every epoch.

    Example:
        >>> from types import SimpleNamespace
        >>> from composer_time import Time, Timestamp
        >>> from composer_optim import LinearScheduler, compile_composer_schedulers
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
        >>> state = SimpleNamespace(
        ...     timestamp=Timestamp(), max_duration=Time(4, "ba"), dataloader_len=Time(2, "ba"), optimizers=[optimizer]
        ... )
        >>> halving = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        >>> schedulers = compile_composer_schedulers([halving, LinearScheduler()], state)
        >>> for batch in range(1, 4):
        ...     optimizer.step()
        ...     state.timestamp = state.timestamp.to_next_batch()
        ...     step_schedulers(schedulers, pytorch=batch % 2 == 0)
        ...     print(optimizer.param_groups[0]["lr"])
        1.5
        0.5
        0.25
    """
    schedulers = tuple(schedulers)
    ours = [scheduler for scheduler in schedulers if _is_composers(scheduler)]
    theirs = [scheduler for scheduler in schedulers if not _is_composers(scheduler)]
    if pytorch and ours and theirs:
        _step_beside(ours, theirs)
        if not composer:
            _multiply_again(ours)
    elif pytorch:
        _step(theirs)
    if composer:
        _step(ours)


def mark_composers(factor: Callable[[int], float]) -> Callable[[int], float]:
    """Mark a function for `LambdaLR` as one that asks the training state, so that its scheduler is told from others."""
    vars(factor)["is_composers"] = True
    return factor


def rates_without_factor(theirs: Sequence[LRScheduler], optimizer: Optimizer) -> list[float]:
    """Answer the rates that PyTorch's schedulers have set, whatever has been multiplied with them since."""
    current = [float(group["lr"]) for group in optimizer.param_groups]
    own = [[float(rate) for rate in scheduler.get_last_lr()] for scheduler in theirs]
    # The one that was made last has set the current rates, wherever it stands. If none has, because these optimizer
    # and schedulers have been side by side before, the last one in order was the last to step.
    return current if current in own else own[-1]


def _is_composers(scheduler: LRScheduler) -> bool:
    return isinstance(scheduler, LambdaLR) and getattr(scheduler.lr_lambdas[0], "is_composers", False)


def _shared_rates(scheduler: LambdaLR) -> list[SharedRate]:
    return [factor for factor in scheduler.lr_lambdas if isinstance(factor, SharedRate)]


def _step(schedulers: Iterable[LRScheduler]) -> None:
    for scheduler in schedulers:
        scheduler.step()


def _step_beside(ours: Sequence[Any], theirs: Sequence[LRScheduler]) -> None:
    """Step PyTorch's on the rates without Composer's factor, which the optimizer then has."""
    groups = theirs[0].optimizer.param_groups
    for group, shared in zip(groups, _shared_rates(ours[-1]), strict=True):
        _set_rate(group, shared.rate)
    _step(theirs)
    for scheduler in ours:
        for group, shared in zip(groups, _shared_rates(scheduler), strict=True):
            shared.rate = float(group["lr"])


def _multiply_again(ours: Sequence[Any]) -> None:
    """Put Composer's factor, as it was, back on the rates."""
    held = [shared for scheduler in ours for shared in _shared_rates(scheduler)]
    for shared in held:
        shared.is_held = True
    try:
        _step(ours)
    finally:
        for shared in held:
            shared.is_held = False


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):  # a captured graph reads this very tensor
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
