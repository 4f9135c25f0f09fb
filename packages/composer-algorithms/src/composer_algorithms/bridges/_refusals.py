"""Checks that reject, before training begins, algorithms that a bridge does not support."""

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any

from torch import nn

from composer_algorithms._arguments import takes_keyword
from composer_algorithms._optimizer_surgery import as_optimizers
from composer_algorithms._pairs import PairMixing
from composer_algorithms.selective_backprop import SelectiveBackprop
from composer_events import Algorithm, Event, State
from composer_events.explanation import declared_events

_BETWEEN = frozenset({Event.AFTER_FORWARD, Event.BEFORE_LOSS})
# Events in the training loops of other libraries' trainers.
SERVED_BY_TRAINERS = frozenset(
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


def check_algorithms(
    algorithms: Any, bridge: str = "this loop", served: Collection[Event] = tuple(Event)
) -> list[Algorithm]:
    """Return one or several algorithms as a list, and reject those that a bridge does not support.

    `served` are the events that the bridge runs. A bridge that runs all of them also creates a graph of the gradients.
    """
    listed = [algorithms] if isinstance(algorithms, Algorithm) else list(algorithms)
    for algorithm in listed:
        if not isinstance(algorithm, Algorithm):
            hint = f"{algorithm.__name__}(...)" if isinstance(algorithm, type) else "such as MixUp(alpha=0.2)"
            raise TypeError(f"algorithms holds {algorithm!r}, which is not an Algorithm: pass objects, {hint}.")
        unserved = {event: event.name for event in Event if event not in served}
        why = ", ".join(name for event, name in unserved.items() if event in events_of(algorithm))
        if why:
            why = f"acts on {why}, which {bridge} never runs, so it would do nothing there"
        elif unserved and algorithm.backwards_create_graph:
            why = f"differentiates through the gradients (backwards_create_graph=True), which {bridge} does not support"
        if why:
            raise ValueError(
                f"{algorithm!r} {why}. Leave it out, or use composer_algorithms.bridges.loop.AlgorithmLoop, which has "
                f"all events."
            )
    return listed


def events_of(algorithm: Algorithm) -> Collection[Event]:
    """Return the events that an algorithm needs: those it declares, or those that `match` accepts or names."""
    declared: Collection[Event] | None = getattr(algorithm, "needed_events", None) or declared_events(algorithm)
    if declared is not None:
        return declared
    code = getattr(type(algorithm).match, "__code__", None)
    # Names in the code count as well, since `match` may depend on a later state.
    found = {Event[name] for name in getattr(code, "co_names", ()) if name in Event.__members__}
    for event in Event:
        with suppress(Exception):  # outside of training, `match` may lack parts of the state
            if algorithm.match(event, State(None, rank_zero_seed=0)):
                found.add(event)
    return found


def check_optimizers(optimizer: Any, model: nn.Module) -> None:
    """Reject optimizers that would never change the model."""
    optimizers = as_optimizers(optimizer)
    if not optimizers:
        raise ValueError(f"optimizer={optimizer!r}: nothing would be trained. Pass the optimizer of the model.")
    own = {id(parameter) for parameter in model.parameters()}
    # One shared parameter is enough: others may be frozen, or belong to a further optimizer.
    held = (id(parameter) for one in optimizers for group in one.param_groups for parameter in group["params"])
    if own.isdisjoint(held):
        names = ", ".join(type(one).__name__ for one in optimizers)
        raise ValueError(
            f"None of the parameters of {names} belongs to the {type(model).__name__}, so nothing would be trained. "
            f"Create the optimizer with the parameters of this model."
        )


def refuse(
    algorithms: Iterable[Algorithm], is_unfit: Callable[[Algorithm], bool], where: str, why: str, instead: str
) -> None:
    """Reject algorithms that cannot be used with a setting of the loop."""
    for algorithm in algorithms:
        if is_unfit(algorithm):
            raise ValueError(f"{algorithm!r} cannot be used {where}: {why}. {instead}")


def refuse_cut_batches(algorithms: Iterable[Algorithm], argument: str, num_microbatches: int) -> None:
    """Reject algorithms that act on whole batches if a batch arrives in several pieces."""
    refuse(
        algorithms if num_microbatches > 1 else (),
        lambda one: isinstance(one, PairMixing) and one.draw_per == "batch",
        f"with {argument}={num_microbatches}",
        f"it mixes whole batches, which the dataloader returns in {num_microbatches} pieces",
        f"Use draw_per='microbatch', or {argument}=1.",
    )


def refuse_without_reduction(algorithms: Iterable[Algorithm], name: str, loss_fn: Callable[..., Any]) -> None:
    """Reject SelectiveBackprop with a loss that cannot give a value for each example."""
    refuse(
        () if takes_keyword(loss_fn, "reduction") else algorithms,
        lambda one: isinstance(one, SelectiveBackprop),
        f"with {name}={loss_fn!r}",
        "it requires the loss of each example, with reduction='none'",
        "Add the parameter reduction='mean' to the function.",
    )


def computes_between(algorithm: Algorithm) -> bool:
    """Return whether an algorithm acts between the forward pass and the loss, on outputs or on targets."""
    interpolates = bool(getattr(algorithm, "interpolate_loss", False))
    return interpolates or not _BETWEEN.isdisjoint(events_of(algorithm))


def needs_model_loss(algorithm: Algorithm) -> bool:
    """Return whether an algorithm computes losses in addition to that of the loop."""
    return bool(getattr(algorithm, "interpolate_loss", False) or getattr(algorithm, "computes_losses", False))
