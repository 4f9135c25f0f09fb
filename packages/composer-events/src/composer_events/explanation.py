"""Explanation of which algorithms act on which event, in which order and why, and which conflict."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations, groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

from composer_events._state_dict import numbered
from composer_events.event import Event
from composer_events.passes import (
    conflict,
    precedence,
    set_filo_order,
    sort_by_precedence,
    sort_by_surgery_rank,
    surgery_rank,
)

if TYPE_CHECKING:
    from composer_events.algorithm import Algorithm
    from composer_events.passes import AlgorithmPass
    from composer_events.state import State

__all__ = ["Explanation", "Turn"]

_HEADERS = ("event", "turn", "algorithm", "listed", "why")


@dataclass(frozen=True, slots=True)
class Turn:
    """One algorithm's position on one event.

    Attributes:
        event: The event.
        algorithm: The class, with `#1` for the second of a class.
        order: Its position among those that act on the event, from 0; `None` if a pass removes it.
        listed: Its position in `state.algorithms`, from 0; `None` if a pass has added it.
        why: The algorithms that passes moved it before, one entry per pass, in the order of the passes.
    """

    event: Event
    algorithm: str
    order: int | None
    listed: int | None
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Order and conflicts of algorithms. `str` of it is a table for people, in which positions count from 1.

    Attributes:
        turns: By event, in the order in which events fire, and then by order.
        conflicts: One or more sentences for each conflict.
        undeclared: Algorithms whose turns may be missing or incomplete, because their class does not declare
            `acts_on`.
        rules: What the passes that moved an algorithm do, by their names.

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


# The name by which users filter, which stays the same if the engine moves to another package.
_log = logging.getLogger("composer.core.engine")


def log_explanation(state: State, passes: Sequence[AlgorithmPass]) -> None:
    """Log the declared order of the algorithms, and conflicts as warnings, without calling any `match`."""
    explanation = explain(state, passes, asks=False)
    for sentence in explanation.conflicts:
        _log.warning("Algorithms conflict: %s", sentence)
    if explanation.turns:
        _log.info("The order of algorithms:\n%s", explanation)


def explain(state: State, passes: Sequence[AlgorithmPass], asks: bool = True) -> Explanation:
    """Return which algorithm acts when and why.

    Args:
        state: The state with the algorithms.
        passes: The passes that order them.
        asks: Whether to call `match` of a copy for a class that does not declare its events.
    """
    names = _Names(state.algorithms)
    events_of: list[tuple[Algorithm, Collection[Event]]] = []
    undeclared: list[str] = []
    for algorithm in state.algorithms:
        declared = declared_events(algorithm)
        if declared is None:
            undeclared.append(names.of(algorithm))
            declared = _asked_events(algorithm, state) if asks else ()
        events_of.append((algorithm, declared))
    turns: list[Turn] = []
    conflicts = [
        f"{names.of(first)} and {names.of(second)}: {reason}"
        for first, second in combinations(state.algorithms, 2)
        if (reason := conflict(first, second) or conflict(second, first))
    ]
    rules: dict[str, str] = {}
    for event in Event:
        acting = [algorithm for algorithm, events in events_of if event in events]
        if acting:
            course = _Course(event, acting, names)
            course.follow(passes)
            turns.extend(course.turns())
            conflicts.extend(course.conflicts)
            rules.update(course.rules)
    # Without duplicates, because the same conflict may occur on several events.
    return Explanation(tuple(turns), tuple(dict.fromkeys(conflicts)), tuple(undeclared), rules)


class _Names:
    """Names of algorithms: the class, followed by `#1` for the second of a class."""

    def __init__(self, algorithms: Iterable[Algorithm]) -> None:
        self._listed: dict[int, tuple[int, str]] = {}
        several = list(algorithms)
        names = numbered([type(algorithm).__name__ for algorithm in several])
        for place, (algorithm, name) in enumerate(zip(several, names, strict=True)):
            self._listed[id(algorithm)] = (place, name)

    def of(self, algorithm: object) -> str:
        return self._listed[id(algorithm)][1] if id(algorithm) in self._listed else type(algorithm).__name__

    def place(self, algorithm: object) -> int | None:
        return self._listed[id(algorithm)][0] if id(algorithm) in self._listed else None


class _Course:
    """The algorithms of one event as the passes reorder them."""

    def __init__(self, event: Event, acting: Sequence[Algorithm], names: _Names) -> None:
        self.event = event
        self.names = names
        self.conflicts: list[str] = []
        self.rules: dict[str, str] = {}
        self._order = list(acting)
        self._left_out: list[Algorithm] = []
        self._why: dict[int, list[str]] = {}

    def follow(self, passes: Sequence[AlgorithmPass]) -> None:
        """Run the passes until one fails."""
        for algorithm_pass in passes:
            # Warnings of a pass are reported as conflicts, even those that a filter would hide.
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    after = list(algorithm_pass(list(self._order), self.event))
                except Exception as error:  # on the event itself, the engine raises it
                    self.conflicts.append(str(error))
                    return
            self.conflicts.extend(str(warning.message) for warning in caught)
            self._compare(algorithm_pass, after)

    def turns(self) -> list[Turn]:
        """Return the turns in order, those that a pass has removed last."""
        placed = [*enumerate(self._order), *((None, algorithm) for algorithm in self._left_out)]
        return [
            Turn(
                event=self.event,
                algorithm=self.names.of(algorithm),
                order=order,
                listed=self.names.place(algorithm),
                why=tuple(self._why.get(id(algorithm), ())),
            )
            for order, algorithm in placed
        ]

    def _compare(self, algorithm_pass: AlgorithmPass, after: list[Algorithm]) -> None:
        before, self._order = self._order, after
        if list(map(id, before)) == list(map(id, after)):
            return
        name = str(getattr(algorithm_pass, "__name__", type(algorithm_pass).__name__))
        if algorithm_pass.__doc__:
            self.rules[name] = algorithm_pass.__doc__.strip().partition("\n")[0]
        # By id, because algorithms need not be hashable.
        present = {id(algorithm) for algorithm in after}
        gone = [algorithm for algorithm in before if id(algorithm) not in present]
        for algorithm in gone:
            self._note(algorithm, f"{name}: left out")
        self._left_out = [algorithm for algorithm in (*self._left_out, *gone) if id(algorithm) not in present]
        # A move is noted for the algorithm that overtakes, not for those that it overtakes.
        was_at = {id(algorithm): place for place, algorithm in enumerate(before)}
        for place, algorithm in enumerate(after):
            own = was_at.get(id(algorithm))
            if algorithm_pass is set_filo_order:
                self._note(algorithm, f"{name}: reversed")
            elif own is None:
                self._note(algorithm, f"{name}: added")
            elif overtaken := [one for one in after[place + 1 :] if was_at.get(id(one), own) < own]:
                names = (self.names.of(one) + _reason(algorithm_pass, algorithm, one) for one in overtaken)
                self._note(algorithm, f"{name}: before {', '.join(names)}")

    def _note(self, algorithm: Algorithm, why: str) -> None:
        self._why.setdefault(id(algorithm), []).append(why)


def _reason(algorithm_pass: AlgorithmPass, first: Algorithm, second: Algorithm) -> str:
    if algorithm_pass is sort_by_surgery_rank:
        return f" ({surgery_rank(first)} < {surgery_rank(second)})"
    # In both directions, because the relation is reversed on events whose name begins with AFTER_.
    if algorithm_pass is sort_by_precedence and (asked := precedence(first, second) or precedence(second, first)):
        return f" ({asked})"
    return ""


def declared_events(algorithm: Algorithm) -> Collection[Event] | None:
    for owner in algorithm.__class__.__mro__:
        if "acts_on" in vars(owner):
            break
        if "match" in vars(owner):  # it may match events that a base class does not declare
            return None
    declared: Any = getattr(algorithm, "acts_on", None)
    return cast("Collection[Event]", declared) if isinstance(declared, Collection) else None


def _asked_events(algorithm: Algorithm, state: State) -> Collection[Event]:
    events: list[Event] = []
    for event in Event:
        with suppress(Exception):  # outside its event, `match` may lack what it reads
            # A copy, because `match` may change the algorithm.
            if copy.copy(algorithm).match(event, state):
                events.append(event)
    return events
