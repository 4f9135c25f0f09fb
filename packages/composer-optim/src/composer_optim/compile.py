"""Bind schedulers to a training state, as schedulers of PyTorch's own kind."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from composer_optim.time_conversion import SchedulerState

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
        ValueError: If `ssr` is not more than 0, is not 1 and the scheduler takes none, or the scheduler is PyTorch's.

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
    return compile_composer_schedulers([scheduler], state, ssr)[0]


def compile_composer_schedulers(
    schedulers: Sequence[Callable[..., float]], state: OptimizedState, ssr: float = 1.0
) -> list[LambdaLR]:
    """Bind several schedulers to one state, so that the learning rate is multiplied with all of their factors.

    Each of the results sets the learning rate to what it was at first times the factors of its own scheduler and of
    those before it. They are to be stepped in their order, all of them: the last one has the last word.

    That word sets the learning rate, whatever it is by then: a scheduler of PyTorch's own beside these would not be one
    factor more, but be overwritten, or overwrite. One among `schedulers` is refused.

    Args:
        schedulers: As for `compile_composer_scheduler`, and so is all the rest.
        state: See there.
        ssr: See there.

    Returns:
        As many schedulers for `state.optimizers[0]` as were given.

    Raises:
        NotImplementedError: If there is no optimizer or more than one.
        ValueError: As for `compile_composer_scheduler`.

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
    if len(state.optimizers) != 1:
        raise NotImplementedError(
            f"Only one optimizer is supported; found {len(state.optimizers)} optimizers. Leave the one in "
            f"state.optimizers whose learning rate is to move."
        )
    _refuse_pytorchs(schedulers)
    bound = [(scheduler, ratio_argument(scheduler, ssr)) for scheduler in schedulers]

    # A function, not a callable object: LambdaLR would save the attributes of an object, and with them the state.
    def product_of_first(count: int) -> Callable[[int], float]:
        return lambda _: math.prod(scheduler(state, *ratio) for scheduler, ratio in bound[:count])

    return [LambdaLR(state.optimizers[0], product_of_first(count)) for count in range(1, len(bound) + 1)]


def _refuse_pytorchs(schedulers: Sequence[Any]) -> None:
    """Raise `ValueError` if one of the schedulers is PyTorch's."""
    names = [getattr(scheduler, "__name__", type(scheduler).__name__) for scheduler in schedulers]
    theirs = [type(scheduler).__name__ for scheduler in schedulers if isinstance(scheduler, LRScheduler)]
    if theirs:
        raise ValueError(
            f"schedulers={names} has PyTorch's {', '.join(theirs)} in it, which sets the learning rate as if it were "
            f"alone and does not multiply with the others. Write it as a Composer scheduler, or use PyTorch's only and "
            f"step them without compiling."
        )


def ratio_argument(scheduler: Callable[..., float], ssr: float) -> "tuple[()] | tuple[float]":
    """Return what to call the scheduler with after the state: `ssr`, or nothing if it takes no more by position.

    Raises:
        ValueError: If `ssr` is not more than 0, or is not 1 and the scheduler takes no second positional argument.
    """
    if not ssr > 0:
        raise ValueError(f"scale_schedule_ratio={ssr!r} must be more than 0. Use 0.5 for half the schedule.")
    kinds = [parameter.kind for parameter in inspect.signature(scheduler).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds or sum(kind in _POSITIONAL for kind in kinds) > 1:
        return (ssr,)
    if ssr != 1.0:
        raise ValueError(
            f"scale_schedule_ratio={ssr!r} cannot be given to {scheduler!r}, which takes the state and nothing else "
            f"by position. Add a second positional parameter, ssr, to it, or leave the ratio at 1.0."
        )
    return ()
