"""Binding of schedulers to a training state, as PyTorch schedulers."""

import functools
import inspect
import math
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from composer_optim.schedule import BoundSchedule, Schedule, check_targets, groups_of
from composer_optim.time_conversion import SchedulerState
from composer_optim.torch_schedulers import check_ratio, scaled_lengths
from composer_optim.warmup import warn_if_warmup_exceeds_training

__all__ = [
    "compile_composer_scheduler",
    "compile_composer_schedulers",
    "check_together",
    "compiled_for",
    "compiled_from",
    "set_last_rates",
    "set_rates",
]


class SharedRate:
    """Learning rate of one parameter group: the result of PyTorch's schedulers times Composer's factor.

    PyTorch's schedulers compute the next rate from the current one, which must not contain Composer's factor, and a
    factor of 0 cannot be divided out again. So the rate without the factor is stored here. `LambdaLR` saves and loads
    the `__dict__` of such an object: the rate and the last factor, so that a run resumes with exactly the same numbers.
    `product`, which returns Composer's current factor, belongs to this run and is in a slot, so it is not saved.
    """

    __slots__ = ("__dict__", "product")

    def __init__(self, product: Callable[[int], float], initial_lr: float, rate: float) -> None:
        self.product = product
        self.initial_lr = initial_lr
        self.rate = rate
        self.factor = 1.0

    def __call__(self, step: int) -> float:
        """Return the current factor of the group's initial rate."""
        self.factor = self.product(step)
        return self._relative()

    def lr(self) -> float:
        """Return the rate with Composer's last factor."""
        return self.initial_lr * self._relative()

    def _relative(self) -> float:
        # A rate that starts at 0 has no factor relative to 0: it stays 0.
        return self.factor * (self.rate / self.initial_lr if self.initial_lr else 1.0)


class _BesideComposers(LRScheduler):
    """Base class added to a PyTorch scheduler, which then computes its rates without Composer's factor."""

    _shared_rates: "list[SharedRate]"

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step without Composer's factor, which is restored afterwards."""
        with _without_factor(self.optimizer, self._shared_rates):
            super().step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the rates shared with Composer's schedulers."""
        return {name: value for name, value in super().state_dict().items() if name != "_shared_rates"}


def compiled_for(scheduler: object) -> Any:
    """Return the training state for which a Composer scheduler was compiled, or `None` for anything else."""
    return getattr(
        scheduler if isinstance(scheduler, BoundSchedule) else _factor_of(scheduler), "_composer_state", None
    )


def _factor_of(scheduler: object) -> Any:
    if isinstance(scheduler, BoundSchedule):
        return scheduler
    factor = scheduler.lr_lambdas[0] if isinstance(scheduler, LambdaLR) else None
    return factor.product if isinstance(factor, SharedRate) else factor


def compiled_from(schedulers: Iterable[object]) -> list[Any]:
    """Return the schedulers as they were given: Composer's for those that were compiled from them."""
    sources: dict[int, object] = {}
    for scheduler in schedulers:
        # All schedulers that were compiled together share one factor.
        for source in getattr(_factor_of(scheduler), "_composer_schedulers", (scheduler,)):
            sources[id(source)] = source
    return list(sources.values())


def check_together(schedulers: Iterable[object]) -> None:
    """Check that compiled Composer schedulers are not combined with schedulers they were not compiled with.

    Each of the two would set the whole learning rate and overwrite the part of the other.
    """
    schedulers = tuple(each for each in schedulers if not isinstance(each, BoundSchedule))
    ours = next((each for each in schedulers if compiled_for(each) is not None), None)
    if ours is None or len(schedulers) == 1:
        return
    for other in schedulers:
        is_elsewhere = isinstance(other, LRScheduler) and other.optimizer is not getattr(ours, "optimizer", None)
        if not is_elsewhere and _shared_by(other) is not _shared_by(ours):
            raise ValueError(
                f"schedulers has a {type(other).__name__} and a Composer scheduler that was compiled without it: "
                f"each would set the whole learning rate. Give the Trainer the schedulers themselves, uncompiled, or "
                f"compile them together: state.schedulers = compile_composer_schedulers([...], state)."
            )


def set_rates(scheduler: LambdaLR | BoundSchedule) -> None:
    """Set the learning rates to the current value of a compiled scheduler, like `step` without counting a step."""
    if isinstance(scheduler, BoundSchedule):
        scheduler.step()
        return
    groups = scheduler.optimizer.param_groups
    for group, base, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=False):
        _set_rate(group, base * factor(scheduler.last_epoch))
    # Copies, because `lr` tensors are changed in place.
    scheduler._last_lr = [rate.clone() if isinstance(rate := group["lr"], torch.Tensor) else rate for group in groups]


def set_last_rates(schedulers: Sequence[LRScheduler], optimizer: Optimizer) -> None:
    """Set an optimizer's learning rates to the last ones that its schedulers set."""
    for group, rate in zip(optimizer.param_groups, rates_without_factor(schedulers, optimizer), strict=False):
        _set_rate(group, rate)


def rates_without_factor(theirs: Sequence[LRScheduler], optimizer: Optimizer) -> list[float]:
    """Return the rates that PyTorch's schedulers have set, without factors that were applied since."""
    current = [float(group["lr"]) for group in optimizer.param_groups]
    own = [[float(rate) for rate in scheduler.get_last_lr()] for scheduler in theirs]
    # The scheduler constructed last has set the current rates, at any position in the list. If none has, because the
    # optimizer and the schedulers were compiled together before, the last one in order was the last to step.
    return current if current in own else own[-1]


# Cached, so that schedulers of one class still have a class in common.
@functools.cache
def _class_beside(cls: type[LRScheduler]) -> type[LRScheduler]:
    if issubclass(cls, _BesideComposers):
        return cls
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return types.new_class(cls.__name__, (_BesideComposers, cls), exec_body=lambda body: body.update(names))


def _shared_by(scheduler: object) -> object:
    """Return an object that all schedulers compiled together have in common."""
    if isinstance(scheduler, _BesideComposers):
        return scheduler._shared_rates[0]
    if isinstance(scheduler, LambdaLR) and compiled_for(scheduler) is not None:
        return scheduler.lr_lambdas[0]
    return scheduler


@contextmanager
def _without_factor(optimizer: Optimizer, shared: Sequence[SharedRate]) -> Iterator[None]:
    """Set the rates without Composer's factor, and multiply the resulting rates by it afterwards."""
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
    if isinstance(group["lr"], torch.Tensor):  # a captured graph reads this tensor, so it must stay the same object
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class OptimizedState(SchedulerState, Protocol):
    """Training state with optimizers."""

    # A sequence of optimizers. `Any`, because type checkers do not see through the descriptor of composer_events.State.
    @property
    def optimizers(self) -> Any:
        """The optimizers."""
        ...


def compile_composer_scheduler(scheduler: Callable[..., float], state: OptimizedState, ssr: float = 1.0) -> LambdaLR:
    """Bind `scheduler` to `state`, so that each `step()` sets the learning rate for the current training time.

    The scheduler is called once immediately: `max_duration`, and the dataloader if any length is in epochs, must be
    known. The result's `state_dict` contains nothing of the scheduler.

    Args:
        scheduler: Called as `scheduler(state, ssr)`, or as `scheduler(state)` if it has only one positional parameter.
            A second positional parameter is the ratio, regardless of its name; bind other options by keyword, as in
            `functools.partial(scheduler, gamma=0.25)`.
        state: The training state, with exactly one optimizer. It is read at every step.
        ssr: The scale schedule ratio, more than 0. `state.max_duration` must already be scaled with it.

    Returns:
        A scheduler for `state.optimizers[0]`. It reads the training time from `state`, not from the number of its
        steps.

    Raises:
        NotImplementedError: If there is not exactly one optimizer.
        TypeError: If `scheduler` cannot be called with a state, such as a class, or `ssr` is not a number.
        ValueError: If `ssr` is not more than 0, is not 1 and the scheduler does not accept one, or the scheduler is
            PyTorch's. At a step, if `state.schedulers` has other schedulers for the same optimizer.

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
            f"scheduler={type(scheduler).__name__} is PyTorch's own, which need not be compiled. Step it directly, "
            f"or pass it to compile_composer_schedulers together with Composer's."
        )
    optimizer = _only_optimizer(state)
    return LambdaLR(optimizer, _product([(scheduler, ratio_argument(scheduler, ssr))], state))


def compile_composer_schedulers(
    schedulers: Sequence[Callable[..., float] | LRScheduler], state: OptimizedState, ssr: float = 1.0
) -> list[Any]:
    """Bind several schedulers to one state, so that the learning rate is multiplied by all of their factors.

    Each result for a Composer scheduler sets the learning rate to its initial value times the current factors of all
    of them. Composer schedulers apply to every optimizer of the state, PyTorch's to the one that they were made for.

    PyTorch schedulers may be included. They are scaled by `ssr` in place and returned as the same objects; the rate
    that they would set alone is one more factor. From then on their steps keep Composer's last factor. So each
    scheduler may be stepped when it is due, in any order.

    A `Schedule` sets another number than the learning rate, or the learning rate of some parameter groups.

    Args:
        schedulers: As for `compile_composer_scheduler`, PyTorch's, or a `Schedule`.
        state: As for `compile_composer_scheduler`, with one optimizer or several.
        ssr: As for `compile_composer_scheduler`.

    Returns:
        For each optimizer in order, one scheduler per argument that applies to it, in the same order. Then those of
        other numbers.

    Raises:
        NotImplementedError: If there is no optimizer.
        TypeError: As for `compile_composer_scheduler`.
        ValueError: As for `compile_composer_scheduler`, and if one of PyTorch's is for another optimizer, cannot be
            scaled, or needs a loss at every step, or if one was compiled before. Nothing is scaled then.

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
    optimizers = [_only_optimizer(state)] if len(state.optimizers) < 2 else list(state.optimizers)
    for scheduler in schedulers:
        if isinstance(scheduler, LRScheduler):
            _check_fit(scheduler, optimizers)
    schedulers, others = _separate(schedulers, state)
    lengths = {id(each): scaled_lengths(each, ssr) for each in schedulers if isinstance(each, LRScheduler)}
    bound = [(each, _ratio_of(each, ssr)) for each in schedulers if not isinstance(each, LRScheduler)]
    settings = [(each, _ratio_of(each, ssr)) for each in others]
    product = _product(bound, state)
    compiled: list[Any] = []
    for optimizer in optimizers:
        own = [each for each in schedulers if not isinstance(each, LRScheduler) or each.optimizer is optimizer]
        compiled += _compile_for(optimizer, own, _products_of_groups(bound, state, optimizer, product))
    # Last, so that an error leaves PyTorch's schedulers unchanged.
    for scheduler in schedulers:
        for name, value in lengths.get(id(scheduler), {}).items():
            setattr(scheduler, name, value)
    return [*compiled, *(BoundSchedule(schedule, ratio, state) for schedule, ratio in settings)]


def _separate(schedulers: Sequence[Any], state: OptimizedState) -> tuple[list[Any], list[Schedule]]:
    """Return the schedulers of learning rates, and the schedules of other numbers."""
    schedules = [each for each in schedulers if isinstance(each, Schedule)]
    check_targets(schedules, state)
    others = [each for each in schedules if each.target != "lr"]
    return [each for each in schedulers if each not in others], others


def _products_of_groups(
    bound: "_Bound", state: OptimizedState, optimizer: Optimizer, product: Callable[[int], float]
) -> list[Callable[[int], float]]:
    if any(isinstance(scheduler, Schedule) for scheduler, _ in bound):
        return [_product(bound, state, group) for group in optimizer.param_groups]
    return [product] * len(optimizer.param_groups)


def _compile_for(
    optimizer: Optimizer,
    schedulers: Sequence[Callable[..., float] | LRScheduler],
    products: Sequence[Callable[[int], float]],
) -> list[LRScheduler]:
    """Return a scheduler of the optimizer for each argument; `products` are the factors of its groups."""
    theirs = [scheduler for scheduler in schedulers if isinstance(scheduler, LRScheduler)]
    factors: list[Any] = list(products)  # of all LambdaLRs; with PyTorch's, a shared rate for each group
    is_shared = bool(theirs) and len(theirs) < len(schedulers)
    if is_shared:
        rates = rates_without_factor(theirs, optimizer)
        initial = [float(group["initial_lr"]) for group in optimizer.param_groups]
        factors = [SharedRate(*group) for group in zip(products, initial, rates, strict=True)]
    # Each of them sets the rate by all factors, so the order in which they step does not matter.
    compiled = [each if isinstance(each, LRScheduler) else LambdaLR(optimizer, factors) for each in schedulers]
    if is_shared:
        for scheduler in theirs:
            _share_rates(scheduler, factors)
    return compiled


def _share_rates(scheduler: Any, rates: Sequence[SharedRate]) -> None:
    # A subclass of the same name, as `fully_shard` does with modules: a method set on the scheduler itself would be
    # saved with its state.
    scheduler.__class__ = _class_beside(type(scheduler))
    scheduler._shared_rates = list(rates)


_Bound = Sequence[tuple[Callable[..., float], "tuple[()] | tuple[float]"]]


def _product(bound: _Bound, state: OptimizedState, group: "dict[str, Any] | None" = None) -> Callable[[int], float]:
    """Return the factor of all schedulers, or of those that apply to a parameter group."""
    if group is None:
        for scheduler, ratio in bound:
            warn_if_warmup_exceeds_training(scheduler, state, *ratio)
    of_group = bound if group is None else _for_group(bound, state, group)

    # A function, not a callable object: LambdaLR would save the attributes of an object, including the state.
    def product(step: int) -> float:
        if step:  # not in the constructor of LambdaLR, when the state may still have old schedulers
            check_together(getattr(state, "schedulers", ()))
        return math.prod(scheduler(state, *ratio) for scheduler, ratio in of_group)

    marked: Any = product
    marked._composer_schedulers = tuple(scheduler for scheduler, _ in bound)
    marked._composer_state = state  # by which `compiled_for` recognizes schedulers compiled by this module
    return product


def _for_group(bound: _Bound, state: OptimizedState, group: dict[str, Any]) -> _Bound:
    def relative(schedule: Schedule) -> Callable[..., float]:
        initial = group.get("initial_lr", group["lr"])
        return lambda *arguments: schedule(*arguments) / initial

    groups, chosen = groups_of(state), list[tuple[Callable[..., float], Any]]()
    for scheduler, ratio in bound:
        if not isinstance(scheduler, Schedule):
            chosen.append((scheduler, ratio))
        elif any(groups[index] is group for _, index in scheduler.find(state)):
            chosen.append((relative(scheduler) if scheduler.absolute else scheduler, ratio))
    return chosen


def _only_optimizer(state: OptimizedState) -> Optimizer:
    if len(state.optimizers) != 1:
        raise NotImplementedError(
            f"Only one optimizer is supported; found {len(state.optimizers)} optimizers. Keep only the "
            f"optimizer whose learning rate to schedule in state.optimizers, or use compile_composer_schedulers, which "
            f"accepts several."
        )
    return state.optimizers[0]


def _check_fit(scheduler: LRScheduler, optimizers: Sequence[Optimizer]) -> None:
    """Refuse a PyTorch scheduler that cannot be combined with Composer's."""
    if compiled_for(scheduler) is not None:
        misfit = "compile_composer_scheduler made: give the Composer scheduler itself"
    elif isinstance(scheduler, ReduceLROnPlateau):
        misfit = "needs a loss at every step: use one that depends on time only, or step it after evaluation"
    elif scheduler.optimizer not in optimizers:
        misfit = "was made for another optimizer: make it for one of state.optimizers"
    else:
        return
    raise ValueError(f"schedulers has a {type(scheduler).__name__} in it that {misfit}.")


def _ratio_of(scheduler: Callable[..., float], ssr: float) -> "tuple[()] | tuple[float]":
    return ratio_argument(scheduler.curve if isinstance(scheduler, Schedule) else scheduler, ssr)


def ratio_argument(scheduler: Callable[..., float], ssr: float) -> "tuple[()] | tuple[float]":
    """Return the arguments after the state: `ssr`, or nothing if the scheduler has no second positional parameter."""
    check_ratio(ssr)
    if isinstance(scheduler, Schedule):
        raise TypeError(
            f"scheduler={scheduler!r} is not a scheduler of all learning rates. Pass it to the Trainer, or to "
            f"compile_composer_schedulers."
        )
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
            f"by position. Add a second positional parameter, ssr, or leave the ratio at 1.0."
        )
    return ()
