"""One learning rate that PyTorch's schedulers and Composer's move together: the product of what each makes of it."""

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

__all__ = ["check_together", "compiled_for", "set_last_rates", "set_rates"]

_SHARED = "_shared_rates"
_STATE = "_composer_state"


class SharedRate:
    """The learning rate of one parameter group: what PyTorch's schedulers made of it, times Composer's factor.

    PyTorch's schedulers work out the next rate from the current one, which must not have Composer's factor in it, and
    a factor of 0 cannot be divided out again. So the rate without it is kept here. `LambdaLR` saves and loads what is
    in the `__dict__` of such an object: the rate and the last factor, so that a run resumes with the very same
    numbers. What belongs to this run is in a slot.

    Args:
        product: Answers Composer's factor of now.
        initial_lr: The group's rate at first, which `LambdaLR` multiplies.
        rate: The group's rate without Composer's factor.
    """

    __slots__ = ("__dict__", "product")

    def __init__(self, product: Callable[[int], float], initial_lr: float, rate: float) -> None:
        self.product = product
        self.initial_lr = initial_lr
        self.rate = rate
        self.factor = 1.0

    def __call__(self, step: int) -> float:
        """Answer what to multiply the group's first rate with now."""
        self.factor = self.product(step)
        return self._relative()

    def lr(self) -> float:
        """Answer the rate with Composer's factor as it was last."""
        return self.initial_lr * self._relative()

    def _relative(self) -> float:
        # A rate that began at 0 has no factor relative to that: it stays 0.
        return self.factor * (self.rate / self.initial_lr if self.initial_lr else 1.0)


class _BesideComposers(LRScheduler):
    """A scheduler of PyTorch's that goes on from its own rates, whatever Composer's have multiplied them with."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step it without Composer's factor, which is put back afterwards as it was."""
        with _without_factor(self.optimizer, vars(self)[_SHARED]):
            super().step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that it has without Composer's."""
        return {name: value for name, value in super().state_dict().items() if name != _SHARED}


def put_beside(theirs: LRScheduler, shared: Sequence[SharedRate]) -> None:
    """Let a scheduler of PyTorch's share its rates with Composer's, whoever steps it and in whatever order.

    Its class becomes one of the same name that derives from it, as `fully_shard` does with modules: a method set on
    the scheduler itself would be saved with its state.
    """
    if not isinstance(theirs, _BesideComposers):
        theirs.__class__ = _class_beside(type(theirs))
    vars(theirs)[_SHARED] = list(shared)


def compiled_for(scheduler: object) -> Any:
    """Answer for which training state a Composer scheduler was compiled; `None` if it is anything else."""
    factor = _first_factor(scheduler)
    return getattr(factor.product if isinstance(factor, SharedRate) else factor, _STATE, None)


def check_together(schedulers: Iterable[object]) -> None:
    """Refuse a list in which a compiled Composer scheduler stands beside one that it was not compiled with.

    Each of the two would set the whole learning rate, and the part of the other would be lost.

    Raises:
        ValueError: If there is such a list.
    """
    schedulers = tuple(schedulers)
    ours = next((each for each in schedulers if compiled_for(each) is not None), None)
    if ours is None or len(schedulers) == 1:
        return
    for other in schedulers:
        is_elsewhere = isinstance(other, LRScheduler) and other.optimizer is not getattr(ours, "optimizer", None)
        if not is_elsewhere and _shared_by(other) is not _shared_by(ours):
            raise ValueError(
                f"schedulers has a {type(other).__name__} beside a Composer scheduler that was compiled without it: "
                f"each would set the whole learning rate. Give the Trainer the schedulers themselves, uncompiled, or "
                f"compile them together: state.schedulers = compile_composer_schedulers([...], state)."
            )


def set_rates(scheduler: LambdaLR) -> None:
    """Set the learning rates to what a compiled scheduler says now, as its `step` does, and count no step."""
    groups = scheduler.optimizer.param_groups
    for group, base, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=False):
        _set_rate(group, base * factor(scheduler.last_epoch))
    scheduler._last_lr = [rate.clone() if isinstance(rate := group["lr"], torch.Tensor) else rate for group in groups]


def set_last_rates(schedulers: Sequence[LRScheduler], optimizer: Optimizer) -> None:
    """Set an optimizer's learning rates to those that its schedulers set last."""
    for group, rate in zip(optimizer.param_groups, rates_without_factor(schedulers, optimizer), strict=False):
        _set_rate(group, rate)


def with_state(factor: Callable[[int], float], state: object) -> Callable[[int], float]:
    """Mark a function for `LambdaLR` as one that asks this state, so that its scheduler is told from others."""
    vars(factor)[_STATE] = state
    return factor


def rates_without_factor(theirs: Sequence[LRScheduler], optimizer: Optimizer) -> list[float]:
    """Answer the rates that PyTorch's schedulers have set, whatever has been multiplied with them since."""
    current = [float(group["lr"]) for group in optimizer.param_groups]
    own = [[float(rate) for rate in scheduler.get_last_lr()] for scheduler in theirs]
    # The one that was made last has set the current rates, wherever it stands. If none has, because these optimizer
    # and schedulers have been side by side before, the last one in order was the last to step.
    return current if current in own else own[-1]


@functools.cache
def _class_beside(cls: type[LRScheduler]) -> type[LRScheduler]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return types.new_class(cls.__name__, (_BesideComposers, cls), exec_body=lambda body: body.update(names))


def _first_factor(scheduler: object) -> Any:
    return scheduler.lr_lambdas[0] if isinstance(scheduler, LambdaLR) else None


def _shared_by(scheduler: object) -> object:
    """Return what all that were compiled together have in common."""
    if isinstance(scheduler, _BesideComposers):
        return vars(scheduler)[_SHARED][0]
    return _first_factor(scheduler) if compiled_for(scheduler) is not None else scheduler


@contextmanager
def _without_factor(optimizer: Optimizer, shared: Sequence[SharedRate]) -> Iterator[None]:
    """Give the optimizer the rates without Composer's factor, and multiply what has become of them with it."""
    groups = optimizer.param_groups
    if len(groups) != len(shared):
        raise RuntimeError(
            f"The optimizer has {len(groups)} parameter groups, and it had {len(shared)} when its schedulers were "
            f"compiled. Add all groups first, or compile the schedulers again: "
            f"compile_composer_schedulers([...], state)."
        )
    for group, each in zip(groups, shared, strict=True):
        _set_rate(group, each.rate)
    try:
        yield
    finally:
        for group, each in zip(groups, shared, strict=True):
            each.rate = float(group["lr"])
            _set_rate(group, each.lr())


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    if isinstance(group["lr"], torch.Tensor):  # a captured graph reads this very tensor
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
