"""Bind schedulers to a training state, as schedulers of PyTorch's own kind."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from composer_optim.side_by_side import (
    SharedRate,
    check_together,
    compiled_for,
    put_beside,
    rates_without_factor,
    with_state,
)
from composer_optim.time_conversion import SchedulerState
from composer_optim.torch_schedulers import check_ratio, scaled_lengths

__all__ = ["compile_composer_scheduler", "compile_composer_schedulers"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class OptimizedState(SchedulerState, Protocol):
    """A training state that has optimizers too."""

    # A sequence of optimizers. Where it is a descriptor, as in composer_events.State, type checkers see no more of it.
    @property
    def optimizers(self) -> Any:
        """The optimizers, of which there must be one."""
        ...


def compile_composer_scheduler(scheduler: Callable[..., float], state: OptimizedState, ssr: float = 1.0) -> LambdaLR:
    """Bind `scheduler` to `state`, so that each `step()` sets the learning rate for where training then is.

    The scheduler is called once right away: `max_duration`, and the dataloader if anything is counted in epochs, must
    be known. Nothing of it goes into the result's `state_dict`.

    Args:
        scheduler: Called as `scheduler(state, ssr)`, or as `scheduler(state)` if that is all it takes by position. A
            second positional parameter is the ratio, whatever its name; bind options of your own by keyword, as in
            `functools.partial(scheduler, gamma=0.25)`.
        state: The training state, with exactly one optimizer. It is read at every step.
        ssr: The scale schedule ratio; more than 0. `state.max_duration` must have been scaled with it already.

    Returns:
        A scheduler for `state.optimizers[0]`. Where training is, it asks `state`; how often it was stepped does not
        matter to it.

    Raises:
        NotImplementedError: If there is no optimizer or more than one.
        TypeError: If `scheduler` cannot be called with a state, as a class cannot, or `ssr` is not a number.
        ValueError: If `ssr` is not more than 0, is not 1 and the scheduler takes none, or the scheduler is PyTorch's.
            At a step, if `state.schedulers` has others beside it for the same optimizer.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from composer_time import Time, Timestamp
        >>> from composer_optim import LinearScheduler
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
        >>> state = SimpleNamespace(
        ...     timestamp=Timestamp(batch=1), max_duration=Time(4, "ba"), dataloader_len=None, optimizers=[optimizer]
        ... )
        >>> compile_composer_scheduler(LinearScheduler(), state).get_last_lr()
        [1.5]
    """
    if isinstance(scheduler, LRScheduler):
        raise ValueError(
            f"scheduler={type(scheduler).__name__} is PyTorch's own, which needs no compiling. Step it as it is, or "
            f"give it to compile_composer_schedulers together with Composer's."
        )
    optimizer = _only_optimizer(state)
    return LambdaLR(optimizer, _product([(scheduler, ratio_argument(scheduler, ssr))], state))


def compile_composer_schedulers(
    schedulers: Sequence[Callable[..., float] | LRScheduler], state: OptimizedState, ssr: float = 1.0
) -> list[LRScheduler]:
    """Bind several schedulers to one state, so that the learning rate is multiplied with all of their factors.

    Each of the results of Composer's schedulers sets the learning rate to what it was at first times the factors that
    all of them have now.

    PyTorch's schedulers may stand among them. They are made shorter or longer with `ssr` and stay the objects that they
    are; what they make of the learning rate, as if alone, is one factor more. From then on a step of theirs leaves
    Composer's factor as it was last. So each may be stepped whenever it is due, in any order.

    Args:
        schedulers: As for `compile_composer_scheduler`, or PyTorch's. The rest is as it is there, too.
        state: See there.
        ssr: See there.

    Returns:
        As many schedulers for `state.optimizers[0]` as were given.

    Raises:
        NotImplementedError: If there is no optimizer or more than one.
        TypeError: As for `compile_composer_scheduler`.
        ValueError: As for `compile_composer_scheduler`, and if one of PyTorch's is for another optimizer, cannot be
            scaled, or asks for a loss at every step, or if one was compiled before. Nothing is scaled then.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from composer_time import Time, Timestamp
        >>> from composer_optim import ConstantScheduler, LinearScheduler
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
        >>> state = SimpleNamespace(
        ...     timestamp=Timestamp(batch=1), max_duration=Time(4, "ba"), dataloader_len=None, optimizers=[optimizer]
        ... )
        >>> compiled = compile_composer_schedulers([LinearScheduler(), ConstantScheduler(0.5)], state)
        >>> compiled[-1].get_last_lr()
        [0.75]
    """
    optimizer = _only_optimizer(state)
    ours = [scheduler for scheduler in schedulers if not isinstance(scheduler, LRScheduler)]
    theirs = [scheduler for scheduler in schedulers if isinstance(scheduler, LRScheduler)]
    bound = [(scheduler, ratio_argument(scheduler, ssr)) for scheduler in ours]
    for scheduler in theirs:
        _check_pytorchs(scheduler, optimizer)
    lengths = [scaled_lengths(scheduler, ssr) for scheduler in theirs]
    factors = _factors(bound, state, theirs, optimizer)
    compiled = [LambdaLR(optimizer, factors) for _ in ours]
    # Nothing raises from here on, so a refusal leaves PyTorch's schedulers as they were.
    for scheduler, scaled in zip(theirs, lengths, strict=True):
        vars(scheduler).update(scaled)
        if isinstance(factors, list):
            put_beside(scheduler, factors)
    rest = iter(compiled)
    return [scheduler if isinstance(scheduler, LRScheduler) else next(rest) for scheduler in schedulers]


_Bound = Sequence[tuple[Callable[..., float], "tuple[()] | tuple[float]"]]


def _factors(
    bound: _Bound, state: OptimizedState, theirs: Sequence[LRScheduler], optimizer: Optimizer
) -> Callable[[int], float] | list[SharedRate]:
    """Make what the `LambdaLR`s multiply with: the product of all, or what each group shares with PyTorch's."""
    product = _product(bound, state)
    if not theirs or not bound:
        return product
    rates = rates_without_factor(theirs, optimizer)
    initial = [float(group["initial_lr"]) for group in optimizer.param_groups]
    return [SharedRate(product, *group) for group in zip(initial, rates, strict=True)]


def _product(bound: _Bound, state: OptimizedState) -> Callable[[int], float]:
    # A function, not a callable object: LambdaLR would save the attributes of an object, and with them the state.
    def product(step: int) -> float:
        if step:  # not while a LambdaLR is made, when the state may still have other schedulers
            check_together(getattr(state, "schedulers", ()))
        return math.prod(scheduler(state, *ratio) for scheduler, ratio in bound)

    return with_state(product, state)


def _only_optimizer(state: OptimizedState) -> Optimizer:
    if len(state.optimizers) != 1:
        raise NotImplementedError(
            f"Only one optimizer is supported; found {len(state.optimizers)} optimizers. Leave the one in "
            f"state.optimizers whose learning rate is to move."
        )
    return state.optimizers[0]


def _check_pytorchs(scheduler: LRScheduler, optimizer: Optimizer) -> None:
    """Raise `ValueError` if a scheduler of PyTorch's cannot stand beside Composer's."""
    name = type(scheduler).__name__
    if compiled_for(scheduler) is not None:
        raise ValueError(
            f"schedulers has a {name} in it that compile_composer_scheduler made. Give the Composer scheduler itself, "
            f"so that all are compiled together."
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            f"schedulers has PyTorch's {name} in it, whose steps need a loss, and schedulers are stepped without one. "
            f"Use one that goes by time, or step it yourself after evaluation."
        )
    if scheduler.optimizer is not optimizer:
        raise ValueError(
            f"schedulers has PyTorch's {name} in it, which was made for another {type(scheduler.optimizer).__name__} "
            f"than the one whose learning rate Composer's schedulers move. Make it for state.optimizers[0]."
        )


def ratio_argument(scheduler: Callable[..., float], ssr: float) -> "tuple[()] | tuple[float]":
    """Return what to call the scheduler with after the state: `ssr`, or nothing if it takes no more by position.

    Raises:
        TypeError: If the scheduler is a class or cannot be called, or `ssr` is not a number.
        ValueError: If `ssr` is not more than 0, or is not 1 and the scheduler takes no second positional argument.
    """
    check_ratio(ssr)
    if isinstance(scheduler, type) or not callable(scheduler):
        hint = (
            f"Call it: {scheduler.__name__}(...)." if isinstance(scheduler, type) else "Pass a function of the state."
        )
        raise TypeError(f"scheduler={scheduler!r} is not a scheduler, which is called with the training state. {hint}")
    kinds = [parameter.kind for parameter in inspect.signature(scheduler).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds or sum(kind in _POSITIONAL for kind in kinds) > 1:
        return (ssr,)
    if ssr != 1.0:
        raise ValueError(
            f"scale_schedule_ratio={ssr!r} cannot be given to {scheduler!r}, which takes the state and nothing else "
            f"by position. Add a second positional parameter, ssr, to it, or leave the ratio at 1.0."
        )
    return ()
