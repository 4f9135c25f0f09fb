"""Passes: functions that order the algorithms that matched an event."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from composer_events.algorithm import Algorithm
from composer_events.event import Event
from composer_events.warnings import NotIntendedUseWarning

__all__ = [
    "AlgorithmPass",
    "DEFAULT_PASSES",
    "set_filo_order",
    "sort_by_precedence",
    "sort_by_surgery_rank",
    "sort_fused_layernorm_last",
    "sort_low_precision_layernorm_last",
    "sort_selective_backprop_first",
    "sort_to_back",
    "sort_to_front",
    "warn_if_multiple_loss_interpolation",
]

AlgorithmPass: TypeAlias = Callable[[Sequence[Algorithm], Event], Sequence[Algorithm]]
"""Function of the algorithms that matched an event, and the event. Returns them in order; may drop or add some."""


def set_filo_order(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Reverse the order on events whose name begins with `AFTER_`: what was done first is undone last.

    Args:
        algorithms: The algorithms that matched.
        event: The event.
    """
    return list(reversed(algorithms)) if event.name.startswith("AFTER_") else list(algorithms)


def sort_by_precedence(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Sort by `Algorithm.runs_before` and `Algorithm.runs_after`, and keep the order of other algorithms if possible.

    On events whose name begins with `AFTER_` the relation is reversed. So MixUp, which `runs_before` label smoothing,
    mixes targets before they are smoothed, and the targets are restored before MixUp computes a loss.

    Args:
        algorithms: The algorithms that matched.
        event: The event.

    Raises:
        ValueError: If the order requirements form a cycle.
    """
    if not any(map(asks_for_precedence, algorithms)):
        return list(algorithms)
    if event.name.startswith("AFTER_"):
        # Reversed twice: ties keep their order, and what acts first undoes last.
        return _in_precedence(algorithms[::-1], event)[::-1]
    return _in_precedence(algorithms, event)


def _in_precedence(algorithms: Sequence[Algorithm], event: Event) -> list[Algorithm]:
    waiting, ordered = list(algorithms), list["Algorithm"]()
    while waiting:
        # Of the algorithms that may run next, take the first in the list, which keeps the order of all others.
        free = [i for i, one in enumerate(waiting) if not any(precedence(o, one) for o in waiting if o is not one)]
        if not free:
            names = ", ".join(type(algorithm).__name__ for algorithm in waiting)
            raise ValueError(
                f"The algorithms {names} cannot be put in order on {event}: their runs_before and runs_after form a "
                f"cycle. Remove one of these names, or use fewer of the algorithms together."
            )
        ordered.append(waiting.pop(free[0]))
    return ordered


def sort_selective_backprop_first(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Put algorithms that must see the batch as it was loaded, such as SelectiveBackprop, first.

    Args:
        algorithms: The algorithms that matched.
        event: The event.
    """
    del event  # on every event alike
    return _stable_partition(algorithms, lambda a: class_flag(a, "runs_first") or is_named(a, "SelectiveBackprop"))


def sort_by_surgery_rank(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """On `Event.INIT`, where models are rebuilt, sort by `Algorithm.surgery_rank`.

    Args:
        algorithms: The algorithms that matched.
        event: The event.
    """
    if event is not Event.INIT:
        return list(algorithms)
    return sorted(algorithms, key=surgery_rank)


def sort_low_precision_layernorm_last(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Put algorithms that convert what the others have made, such as LowPrecisionLayerNorm, last.

    Args:
        algorithms: The algorithms that matched.
        event: The event.
    """
    del event  # on every event alike
    names = ("LowPrecisionLayerNorm", "LowPrecisionGroupNorm")
    return _stable_partition(algorithms, lambda a: not (class_flag(a, "runs_last") or is_named(a, *names)))


sort_fused_layernorm_last = sort_low_precision_layernorm_last
"""An older name of `sort_low_precision_layernorm_last`."""


def warn_if_multiple_loss_interpolation(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Warn if several algorithms would blend the loss, each as if it were the only one. The order stays.

    Args:
        algorithms: The algorithms that matched.
        event: The event.
    """
    blending = [type(a).__name__ for a in algorithms if getattr(a, "interpolate_loss", False)]
    if len(blending) > 1:
        warnings.warn(
            f"{' and '.join(blending)} all have interpolate_loss=True on {event}. Each blends the loss as if it were "
            f"the only one, so the result equals none of their losses. Set it on one of them at most.",
            NotIntendedUseWarning,
            stacklevel=2,
        )
    return algorithms


def sort_to_front(list_to_sort: Sequence[Any], cls: type | tuple[type, ...]) -> Sequence[Any]:
    """Return the sequence with all instances of a class first, otherwise in the original order.

    Args:
        list_to_sort: Any objects.
        cls: A class, or several as a tuple.

    Example:
        >>> sort_to_front([1, "a", 2, "b"], str)
        ['a', 'b', 1, 2]
    """
    return _stable_partition(list_to_sort, lambda item: isinstance(item, cls))


def sort_to_back(list_to_sort: Sequence[Any], cls: type | tuple[type, ...]) -> Sequence[Any]:
    """Return the sequence with all instances of a class last, otherwise in the original order.

    Args:
        list_to_sort: Any objects.
        cls: A class, or several as a tuple.

    Example:
        >>> sort_to_back([1, "a", 2, "b"], int)
        ['a', 'b', 1, 2]
    """
    return _stable_partition(list_to_sort, lambda item: not isinstance(item, cls))


# The reversal comes before the sorts: after them it would turn "first" into "last" on every AFTER_ event. Surgery ranks
# come before first and last, because these apply on every event, including INIT.
DEFAULT_PASSES: Final[tuple[AlgorithmPass, ...]] = (
    set_filo_order,
    sort_by_precedence,
    sort_by_surgery_rank,
    sort_selective_backprop_first,
    sort_low_precision_layernorm_last,
    warn_if_multiple_loss_interpolation,
)
"""The default passes of an engine, in order."""


def _stable_partition(items: Sequence[Any], is_early: Callable[[Any], bool]) -> list[Any]:
    return sorted(items, key=lambda item: not is_early(item))


def surgery_rank(algorithm: object) -> int:
    """Return the surgery rank of an algorithm, or the default one."""
    return _class_value(algorithm, "surgery_rank", Algorithm.surgery_rank)


def class_flag(algorithm: object, attribute: str) -> bool:
    """Return whether an attribute of the algorithm's class is true."""
    return _class_value(algorithm, attribute, False) is True


def is_named(algorithm: object, *names: str) -> bool:
    """Return whether the algorithm's class or one of its bases has one of the names."""
    # By name, because the algorithms belong to a package that depends on this one.
    return any(base.__name__ in names for base in algorithm.__class__.__mro__)


def asks_for_precedence(algorithm: object) -> bool:
    """Return whether the algorithm's class declares an order requirement."""
    return bool(_class_value(algorithm, "runs_before", ()) or _class_value(algorithm, "runs_after", ()))


def precedence(first: object, second: object) -> str:
    """Return the requirement that puts the first algorithm before the second one, or an empty string."""
    if is_named(second, *_class_value(first, "runs_before", ())):
        return f"{first.__class__.__name__}.runs_before"
    if is_named(first, *_class_value(second, "runs_after", ())):
        return f"{second.__class__.__name__}.runs_after"
    return ""


def conflict(first: object, second: object) -> str:
    """Return why the first algorithm is incompatible with the second one, or an empty string."""
    reasons = _class_value(first, "conflicts_with", {})
    return next((reasons[name] for name in reasons if is_named(second, name)), "")


def _class_value(algorithm: object, attribute: str, default: Any) -> Any:
    return getattr(algorithm.__class__, attribute, default)
