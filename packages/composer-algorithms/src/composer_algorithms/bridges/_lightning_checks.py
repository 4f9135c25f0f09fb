"""What Lightning's Trainer cannot do for algorithms, as it is set up."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from composer_algorithms.bridges._refusals import (
    check_algorithms,
    computes_between,
    needs_model_loss,
    refuse,
    refuse_cut_batches,
    refuse_graphs,
    refuse_unserved,
)
from composer_algorithms.sam import SAM
from composer_algorithms.selective_backprop import SelectiveBackprop
from composer_events.algorithm import Algorithm
from composer_events.event import Event
from composer_events.state import State

SERVED = frozenset(
    {
        *(Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START, Event.FIT_END),
        *(Event.EPOCH_START, Event.EPOCH_END, Event.AFTER_DATALOADER),
        *(Event.BATCH_START, Event.BEFORE_TRAIN_BATCH, Event.AFTER_TRAIN_BATCH, Event.BATCH_END),
        *(Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS),
        *(Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD),
        *(Event.EVAL_BEFORE_ALL, Event.EVAL_START, Event.EVAL_END, Event.EVAL_AFTER_ALL),
        *(Event.EVAL_STANDALONE_START, Event.EVAL_STANDALONE_END),
    }
)


def check_algorithms_alone(
    algorithms: Algorithm | Iterable[Algorithm], loss_fn: Callable[..., Any] | None
) -> list[Algorithm]:
    """Return the algorithms as a list, if each can be served by some Trainer.

    Raises:
        TypeError: If one of them is none.
        ValueError: If one of them cannot be served, or needs a `loss_fn`.
    """
    listed = check_algorithms(algorithms)
    refuse_unserved(listed, SERVED, "Lightning's Trainer", State(None, rank_zero_seed=0))
    refuse_graphs(listed, "Lightning's Trainer")
    for algorithm in listed:
        if needs_model_loss(algorithm) and loss_fn is None:
            raise ValueError(
                f"{algorithm!r} computes losses of its own, and training_step computes only that of the batch: pass "
                f"loss_fn to AlgorithmCallback, such as torch.nn.functional.cross_entropy."
            )
    if loss_fn is not None and not _takes_reduction(loss_fn):
        refuse(
            listed,
            (SelectiveBackprop,),
            f"with loss_fn={loss_fn!r}",
            "it asks for the loss of each example by reduction='none'",
            "Let the function take reduction='mean'.",
        )
    return listed


def check_fit(trainer: Any, module: Any, algorithms: Sequence[Algorithm]) -> None:
    """Refuse what does not go with the Trainer or the module.

    Raises:
        ValueError: If there is such a thing.
    """
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__}.automatic_optimization is False: the module steps by itself, and algorithms are "
            f"not told of its losses. Use automatic optimization, or AlgorithmLoop of "
            f"composer_algorithms.bridges.loop in a loop of your own."
        )
    if not isinstance(trainer.strategy, (DDPStrategy, SingleDeviceStrategy)):
        raise ValueError(
            f"strategy is a {type(trainer.strategy).__name__}, under which weights and optimizers are not the module's "
            f"own: algorithms go with one device or DDP. For sharded models use the Trainer of composer-suite."
        )
    if is_overridden("configure_model", module):
        raise ValueError(
            f"{type(module).__name__}.configure_model makes layers after algorithms have changed the module: make them "
            f"in __init__."
        )
    if getattr(module, "_compiler_ctx", None) is not None and any(map(computes_between, algorithms)):
        names = ", ".join(type(algorithm).__name__ for algorithm in algorithms if computes_between(algorithm))
        raise ValueError(
            f"{names} acts within training_step, and torch.compile has compiled the whole {type(module).__name__}: "
            f"compile the network in it instead."
        )
    if trainer.state.fn == "fit":
        _check_duration(trainer)
    check_accumulation(trainer, algorithms)


def check_accumulation(trainer: Any, algorithms: Sequence[Algorithm]) -> None:
    """Refuse algorithms that do not go with the number of batches of a step, or with float16.

    Raises:
        ValueError: If there is one.
    """
    pieces = trainer.accumulate_grad_batches
    refuse_cut_batches(algorithms, "accumulate_grad_batches", pieces)
    if pieces > 1:
        why = "its second look would see the last of the batches only"
        refuse(algorithms, (SAM,), f"with accumulate_grad_batches={pieces}", why, "Pass accumulate_grad_batches=1.")
    if trainer.precision in ("16-mixed", 16):
        why = "the scaler of its gradients steps without a closure"
        refuse(algorithms, (SAM,), f"with precision={trainer.precision!r}", why, "Use precision='bf16-mixed'.")


def _check_duration(trainer: Any) -> None:
    has_steps = trainer.max_steps is not None and trainer.max_steps >= 0
    if not has_steps and (trainer.max_epochs is None or trainer.max_epochs < 0):
        raise ValueError(
            f"max_epochs={trainer.max_epochs!r} and max_steps={trainer.max_steps!r} give training no end, and "
            f"algorithms go by the part of it that is done: pass one of them."
        )


def _takes_reduction(loss_fn: Callable[..., Any]) -> bool:
    parameters = inspect.signature(loss_fn).parameters
    return "reduction" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
