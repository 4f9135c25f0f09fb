"""The order that the default passes give, worked out once for each event and sequence of classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from composer_events.passes import DEFAULT_PASSES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from composer_events.algorithm import Algorithm
    from composer_events.event import Event

_MAX_KEPT: Final = 256


class DefaultOrder:
    """Apply the default passes, and remember how they moved things.

    They look at nothing but the event, the classes, and which algorithms blend the loss, so for the same ones the same
    moves are right again. The warning about blended losses is given when such a combination is first seen.
    """

    def __init__(self) -> None:
        self._orders: dict[tuple[object, ...], tuple[int, ...]] = {}

    def __call__(self, matched: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
        """Return the algorithms in the order in which they act."""
        if len(matched) < 2:
            return matched
        key = (
            event,
            *[algorithm.__class__ for algorithm in matched],
            *[bool(getattr(algorithm, "interpolate_loss", False)) for algorithm in matched],
        )
        order = self._orders.get(key)
        if order is None:
            order = _positions(matched, event)
            if len(self._orders) >= _MAX_KEPT:  # algorithms that match by chance would fill the memory
                self._orders.clear()
            self._orders[key] = order
        return [matched[position] for position in order]


def _positions(matched: Sequence[Algorithm], event: Event) -> tuple[int, ...]:
    ordered = matched
    for default_pass in DEFAULT_PASSES:
        ordered = default_pass(ordered, event)
    # By identity: algorithms need be neither hashable nor different from one another.
    place = {id(algorithm): position for position, algorithm in enumerate(matched)}
    return tuple(place[id(algorithm)] for algorithm in ordered)
