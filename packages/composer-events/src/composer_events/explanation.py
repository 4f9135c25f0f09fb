"""What an engine says of its algorithms: which act on which event, in which order, why, and what conflicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from composer_events.event import Event

__all__ = ["Explanation", "Turn"]

_HEADERS = ("event", "turn", "algorithm", "listed", "why")


@dataclass(frozen=True, slots=True)
class Turn:
    """One algorithm's turn on one event.

    Attributes:
        event: The event.
        algorithm: The class, with `#1` for the second of a class.
        order: Its place among those that act on the event, from 0; `None` if a pass leaves it out.
        listed: Its place in `state.algorithms`, from 0; `None` if a pass has added it.
        why: What the passes have moved it before, one entry for each pass that did, in the order of the passes.
    """

    event: Event
    algorithm: str
    order: int | None
    listed: int | None
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Who acts when, and what conflicts; `str` of it is a table for people, in which places count from 1.

    Attributes:
        turns: By event, in the order in which events fire, and then by order.
        conflicts: What does not go together, one sentence or more for each.
        undeclared: Algorithms that are not among the turns, or perhaps not among all of theirs, because their class
            does not declare `acts_on`.
        rules: What the passes that moved something do, by their names.

    Example:
        >>> swapped = Turn(Event.AFTER_LOSS, "MixUp", order=0, listed=1, why=("set_filo_order: reversed",))
        >>> other = Turn(Event.AFTER_LOSS, "LabelSmoothing", order=1, listed=0, why=("set_filo_order: reversed",))
        >>> print(Explanation((swapped, other)))
        event       turn  algorithm       listed  why
        AFTER_LOSS  1     MixUp           2       set_filo_order: reversed
                    2     LabelSmoothing  1       set_filo_order: reversed
    """

    turns: tuple[Turn, ...] = ()
    conflicts: tuple[str, ...] = ()
    undeclared: tuple[str, ...] = ()
    rules: Mapping[str, str] = field(default_factory=dict[str, str])

    def of(self, event: Event | str) -> tuple[Turn, ...]:
        """Return the turns of one event, in order.

        Args:
            event: The event, or its name.
        """
        wanted = Event(event)
        return tuple(turn for turn in self.turns if turn.event is wanted)

    def __str__(self) -> str:
        shared: list[Turn] = []
        alone: dict[str, list[str]] = {}
        for _, group in groupby(self.turns, attrgetter("event")):
            turns = list(group)
            if len(turns) > 1 or turns[0].why:
                shared.extend(turns)
            else:
                alone.setdefault(turns[0].algorithm, []).append(turns[0].event.name)
        blocks = [
            _table(shared),
            _section("Alone on their events:", (f"{name}: {', '.join(events)}" for name, events in alone.items())),
            _section("What the passes do:", (f"{name}: {rule}" for name, rule in self.rules.items())),
            _section("Only match knows when these act:", self.undeclared),
            _section("Conflicts:", self.conflicts),
        ]
        return "\n\n".join(filter(None, blocks)) or "No algorithms."


def _table(turns: Sequence[Turn]) -> str:
    if not turns:
        return ""
    rows = [_HEADERS, *map(_row, turns, [None, *turns])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _row(turn: Turn, above: Turn | None) -> tuple[str, ...]:
    event = "" if above is not None and above.event is turn.event else turn.event.name
    order = "never" if turn.order is None else str(turn.order + 1)
    listed = "added" if turn.listed is None else str(turn.listed + 1)
    return event, order, turn.algorithm, listed, "; ".join(turn.why)


def _section(title: str, lines: Iterable[str]) -> str:
    listed = [f"  {line}" for line in lines]
    return "\n".join([title, *listed]) if listed else ""
